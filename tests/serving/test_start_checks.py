"""A fault that is known before the start is one sentence, and no process was started."""

import json
from pathlib import Path

import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.errors import SlipstreamError
from slipstream.serving.start_checks import check_bundle, check_history, find_store_fault

MODEL = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 64}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    random_bundle(tmp_path / "bundle", MODEL, num_items=3, ids=["a", "b", "c/d"])
    return tmp_path / "bundle"


def test_a_bundle_that_can_be_opened_passes(bundle: Path):
    check_bundle(bundle)


def test_what_is_no_bundle_is_refused_with_the_way_to_make_one(tmp_path: Path):
    with pytest.raises(SlipstreamError, match="slipstream export RUN --out"):
        check_bundle(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bundle.json", b"{", "bundle.json"),
        ("bundle.json", b"{}", "not the description of a bundle"),
        ("bundle.json", json.dumps([]).encode(), "not the description of a bundle"),
        ("items.arrow", b"not arrow", "item vocabulary"),
        ("items.arrow", None, "item vocabulary"),
        ("weights.safetensors", b"short", "weights of bundle"),
        ("weights.safetensors", None, "weights of bundle"),
    ],
)
def test_a_damaged_bundle_names_the_part(bundle: Path, name: str, content: bytes, says: str):
    (bundle / name).unlink()
    if content is not None:
        (bundle / name).write_bytes(content)
    with pytest.raises(SlipstreamError, match=says):
        check_bundle(bundle)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("bundle.json", b'"heads": 2', b'"heads": 1'), ("items.arrow", b"c/d", b"c/e")],
)
def test_a_changed_byte_is_found_before_a_process_starts(
    bundle: Path, name: str, old: bytes, new: bytes
):
    content = (bundle / name).read_bytes()
    assert old in content
    (bundle / name).write_bytes(content.replace(old, new))
    with pytest.raises(SlipstreamError, match=f"{name} was changed after it was written"):
        check_bundle(bundle)


def test_weights_that_end_early_are_noticed(bundle: Path):
    whole = (bundle / "weights.safetensors").read_bytes()
    (bundle / "weights.safetensors").write_bytes(whole[:-8])
    with pytest.raises(SlipstreamError, match="weights of bundle"):
        check_bundle(bundle)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://x", "names no history store"),
        ("history.db", "names no history store"),
        ("redis://127.0.0.1:1/0", "does not answer"),
        ("sqlite:/proc/nowhere/history.db", "nowhere"),
    ],
)
def test_a_history_store_that_cannot_be_used_is_refused(url: str, says: str):
    with pytest.raises(SlipstreamError, match=says):
        check_history(url)


def test_a_history_store_that_answers_passes(tmp_path: Path):
    check_history(f"sqlite:{tmp_path / 'new' / 'history.db'}")


def test_a_store_that_may_come_back_is_told_from_one_that_cannot():
    fault = find_store_fault("redis://127.0.0.1:1/0")
    assert fault is not None and "does not answer" in str(fault)
    with pytest.raises(SlipstreamError, match="names no history store"):
        find_store_fault("mysql://x")
