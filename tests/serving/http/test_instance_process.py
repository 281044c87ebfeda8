"""Opening bundles: again only when they changed, measured once, warm after a restart."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving.bundle import random_bundle
from slipstream.serving.http.instance_app import InstanceSettings
from slipstream.serving.http.instance_process import open_instance
from slipstream.serving.http.process import CANNOT_START, SECRET_VARIABLE

MODEL = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 64}
SMALL = {"device_bytes": 1 << 20, "host_bytes": 1 << 20, "calibrate_seconds": 0.01}


def settings(tmp_path: Path, **changes: Any) -> InstanceSettings:
    shelf = tmp_path / "shelf"
    shelf.mkdir(exist_ok=True)
    given = {"name": "i-0", "bundle": str(tmp_path / "bundle"), "history": "", "model": SMALL}
    return InstanceSettings(**{**given, "shelf": str(shelf), **changes})


def bundle(tmp_path: Path, **changes: Any) -> Path:
    random_bundle(tmp_path / "bundle", MODEL | changes, num_items=50, first_id=0)
    return tmp_path / "bundle"


def test_another_version_is_opened_beside_the_first(tmp_path: Path):
    first = open_instance(settings(tmp_path), bundle(tmp_path))
    second = open_instance(settings(tmp_path), bundle(tmp_path, max_len=72), first)
    assert second.version != first.version and second.max_len == 72
    assert second.cost is not first.cost  # a model of another size is measured
    assert len(list((tmp_path / "shelf").glob("*.shelf"))) == 2  # the first still serves
    first.discard()
    assert len(list((tmp_path / "shelf").glob("*.shelf"))) == 1
    second.close()


def test_a_restarted_process_knows_what_was_measured_and_deletes_other_versions(tmp_path: Path):
    directory = bundle(tmp_path)
    first = open_instance(settings(tmp_path), directory)
    (tmp_path / "shelf" / "i-0-0123456789abcdef.shelf").touch()
    (tmp_path / "shelf" / "i-1-0123456789abcdef.shelf").touch()
    first.close()
    again = open_instance(settings(tmp_path), directory)
    assert again.cost.measured() == first.cost.measured()
    names = sorted(path.name for path in (tmp_path / "shelf").glob("*.shelf"))
    assert names == [f"i-0-{first.version[:16]}.shelf", "i-1-0123456789abcdef.shelf"]
    again.close()


def test_items_named_by_text_are_served(tmp_path: Path):
    names = [f"item {n:02}" for n in range(50)]
    random_bundle(tmp_path / "bundle", MODEL, num_items=50, ids=names)
    opened = open_instance(settings(tmp_path, shelf=None), tmp_path / "bundle")
    assert opened.items.find(["item 07", "item 99"]).tolist() == [7, -1]
    opened.close()


def test_a_process_that_cannot_start_says_why_once_and_ends_with_its_own_code(tmp_path: Path):
    given = settings(tmp_path, history=f"sqlite:{tmp_path / 'history.db'}")
    command = [sys.executable, "-m", "slipstream.serving.http.instance_process"]
    ended = subprocess.run(
        [*command, msgspec.json.encode(given).decode()],
        env={**os.environ, SECRET_VARIABLE: "a secret of sixteen bytes or more"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == CANNOT_START
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
