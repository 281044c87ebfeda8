"""Opening bundles: again only when they changed, measured once, warm after a restart."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.errors import SlipstreamError
from slipstream.serving.http.instance_app import InstanceSettings
from slipstream.serving.http.instance_process import action_columns, open_instance

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


def test_an_unchanged_bundle_is_not_opened_again_and_a_changed_one_is(tmp_path: Path):
    bundle(tmp_path)
    first = open_instance(settings(tmp_path))
    assert open_instance(settings(tmp_path), first) is first
    bundle(tmp_path, max_len=72)
    second = open_instance(settings(tmp_path), first)
    assert second.version != first.version and second.max_len == 72
    assert second.cost is not first.cost  # a model of another size is measured
    assert len(list((tmp_path / "shelf").glob("*.shelf"))) == 2  # the first still serves
    first.discard()
    assert len(list((tmp_path / "shelf").glob("*.shelf"))) == 1
    second.close()


def test_a_restarted_process_knows_what_was_measured_and_deletes_other_versions(tmp_path: Path):
    bundle(tmp_path)
    first = open_instance(settings(tmp_path))
    (tmp_path / "shelf" / "i-0-0123456789abcdef.shelf").touch()
    (tmp_path / "shelf" / "i-1-0123456789abcdef.shelf").touch()
    first.close()
    again = open_instance(settings(tmp_path))
    assert again.cost.measured() == first.cost.measured()
    names = sorted(path.name for path in (tmp_path / "shelf").glob("*.shelf"))
    assert names == [f"i-0-{first.version[:16]}.shelf", "i-1-0123456789abcdef.shelf"]
    again.close()


def test_items_named_by_text_are_refused(tmp_path: Path):
    path = bundle(tmp_path)
    (file,) = path.glob("*.arrow")
    ids = pa.record_batch({"id": pa.array([f"item {n:02}" for n in range(50)])})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, ids.schema) as writer:
        writer.write_batch(ids)
    with pytest.raises(SlipstreamError, match="named by text"):
        open_instance(settings(tmp_path, shelf=None))


def test_the_store_keeps_the_actions_a_ranking_bundle_reads(tmp_path: Path):
    random_bundle(tmp_path / "ranking", MODEL, task="ranking", num_items=50, first_id=0)
    random_bundle(tmp_path / "retrieval", MODEL, task="retrieval", num_items=50, first_id=0)
    assert action_columns(tmp_path / "ranking") == ("click", "like")
    assert action_columns(tmp_path / "retrieval") == ()
