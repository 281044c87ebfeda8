"""Pinned versions stay as they were while their directory is replaced, and cost no copy."""

import json
import os
import shutil
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.bundle_pins import BundlePins


def write(bundle: Path, version: str) -> None:
    """Replace a bundle as an export does."""
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir()
    (bundle / "bundle.json").write_text(json.dumps({"version": version}))
    (bundle / "weights").write_text(f"weights of {version}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_pinned_version_is_read_after_its_directory_was_replaced(tmp_path: Path):
    bundle, place = tmp_path / "bundle", tmp_path / "versions"
    write(bundle, "one")
    pins = BundlePins(bundle, place)
    assert pins.pin() == pins.pin() == "one"
    write(bundle, "two")
    assert (pins.path("one") / "weights").read_text() == "weights of one"
    assert pins.pin() == "two"
    shutil.rmtree(bundle)
    texts = [(pins.path(name) / "weights").read_text() for name in ("one", "two")]
    assert texts == ["weights of one", "weights of two"]
    assert json.loads((pins.path("two") / "bundle.json").read_text()) == {"version": "two"}


def test_two_bundles_are_one_version(tmp_path: Path):
    write(tmp_path / "ranking", "rank1")
    write(tmp_path / "finding", "find1")
    pins = BundlePins(tmp_path / "ranking", tmp_path / "versions", tmp_path / "finding")
    assert pins.pin() == "find1+rank1"
    write(tmp_path / "finding", "find2")
    assert pins.pin() == "find2+rank1"
    texts = [
        (pins.path(version) / place).read_text()
        for version in ("find1+rank1", "find2+rank1")
        for place in ("weights", "retrieval/weights")
    ]
    assert texts == [f"weights of {each}" for each in ("rank1", "find1", "rank1", "find2")]


def test_released_versions_close_their_files(tmp_path: Path):
    bundle, place = tmp_path / "bundle", tmp_path / "versions"
    before = open_files()
    write(bundle, "one")
    pins = BundlePins(bundle, place)
    pins.pin()
    write(bundle, "two")
    pins.pin()
    pins.keep({"two"})
    assert [path.name for path in place.iterdir()] == ["two"]
    with pytest.raises(SlipstreamError, match="version one is not pinned"):
        pins.path("one")
    pins.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ("{", "not the description of a bundle"),
        ("[]", "not the description of a bundle"),
        ('{"version": "../../etc"}', "no usable version"),
        ('{"version": ""}', "no usable version"),
        (None, "is not a bundle, or is being replaced"),
    ],
)
def test_what_is_no_version_is_refused(tmp_path: Path, description: str | None, says: str):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    if description is not None:
        (bundle / "bundle.json").write_text(description)
    before = open_files()
    with pytest.raises(SlipstreamError, match=says):
        BundlePins(bundle, tmp_path / "versions").pin()
    assert open_files() == before
