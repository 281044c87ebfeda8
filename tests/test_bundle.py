"""A bundle is written whole, its version digests what decides a score, and damage is refused."""

import pyarrow as pa
import pytest
import torch

from slipstream.bundle import content_version, read_bundle, write_bundle
from slipstream.errors import SlipstreamError

TENSORS = {"model/w": torch.arange(6.0).reshape(2, 3), "tables/item": torch.ones(4, 2)}
RECIPE = {"name": "tiny", "task": "retrieval", "model": {"dim": 2}, "loss": {"kind": "bce"}}


@pytest.fixture
def bundle(tmp_path):
    items = tmp_path / "items.arrow"
    with pa.OSFile(str(items), "wb") as file, pa.ipc.new_file(file, pa.schema([])):
        pass
    write_bundle(tmp_path / "bundle", RECIPE, {"num_items": 4}, TENSORS, items, step=7)
    return tmp_path / "bundle"


def test_what_was_written_is_read(bundle):
    opened = read_bundle(bundle)
    assert opened.description["recipe"] == RECIPE and opened.description["step"] == 7
    assert torch.equal(opened.part("model")["w"], TENSORS["model/w"])
    assert opened.items_path.is_file()


def test_the_version_depends_on_weights_and_not_on_figures(bundle, tmp_path):
    version = read_bundle(bundle).version
    items = bundle / "items.arrow"
    again = write_bundle(tmp_path / "b", RECIPE, {"num_items": 4}, TENSORS, items, step=8)
    assert again == version
    changed = {**TENSORS, "tables/item": TENSORS["tables/item"] + 1}
    assert write_bundle(tmp_path / "c", RECIPE, {"num_items": 4}, changed, items) != version
    assert content_version({}, changed) != content_version({}, TENSORS)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("bundle.json", None, "is not a bundle"),
        ("bundle.json", b'{"format": 99}', "is not a bundle of format 1"),
        ("weights.safetensors", b"\x00" * 20, "cannot be read"),
        ("weights.safetensors", None, "cannot be read"),
    ],
)
def test_a_damaged_bundle_is_one_sentence(bundle, name, content, sentence):
    (bundle / name).unlink()
    if content is not None:
        (bundle / name).write_bytes(content)
    with pytest.raises(SlipstreamError, match=sentence):
        read_bundle(bundle)
