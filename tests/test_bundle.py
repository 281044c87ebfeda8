"""A bundle comes back as it was written; its version is a digest of all that decides a score."""

import json

import pytest
import torch

from slipstream.bundle import (
    DESCRIPTION,
    WEIGHTS,
    content_version,
    read_bundle,
    write_bundle,
)
from slipstream.errors import SlipstreamError

RECIPE = {"task": "retrieval", "model": {"dim": 4}, "tables": {"rule": "adamw"}, "seed": 1}
SIZES = {"items": 3}


def tensors(fill=1.0):
    return {"model/w": torch.full((2, 2), fill), "tables/item": torch.zeros(3, 4).t()}


@pytest.fixture
def items(tmp_path):
    (tmp_path / "vocabulary").write_bytes(b"arrow")
    return tmp_path / "vocabulary"


def test_a_bundle_comes_back_as_it_was_written(tmp_path, items):
    version = write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items, step=7)
    bundle = read_bundle(tmp_path / "b")
    assert bundle.version == version and bundle.items_path.read_bytes() == b"arrow"
    assert bundle.description["recipe"] == RECIPE and bundle.description["step"] == 7
    assert list(bundle.part("model")) == ["w"] and (bundle.part("model")["w"] == 1).all()
    assert torch.equal(bundle.part("tables")["item"], tensors()["tables/item"])


def test_the_version_follows_what_decides_a_score_and_nothing_else(tmp_path, items):
    def version(recipe=RECIPE, sizes=SIZES, values=None, **figures):
        return write_bundle(tmp_path / "b", recipe, sizes, values or tensors(), items, **figures)

    first = version(step=1)
    assert first == version(step=2, metrics={"HR@10": 0.3}) == version(RECIPE | {"seed": 9})
    others = [
        version(RECIPE | {"model": {"dim": 8}}),
        version(sizes={"items": 4}),
        version(values=tensors(2.0)),
        version(values={"model/v": tensors()["model/w"], "tables/item": torch.zeros(4, 3)}),
    ]
    assert len({first, *others}) == 5


def test_versions_are_those_of_bundles_written_before():
    description = {"format": 1, "recipe": {"task": "retrieval"}, "sizes": {"items": 2}}
    values = {"model/w": torch.arange(4.0).view(2, 2), "codes/genre": torch.tensor([1, 0])}
    assert content_version(description, values) == "a3236df987dda67535014013ae8a4d1b"


def test_what_is_no_bundle_is_one_sentence(tmp_path, items):
    with pytest.raises(
        SlipstreamError, match=r"is not a bundle .* make one with `slipstream export"
    ):
        read_bundle(tmp_path)
    write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    weights = tmp_path / "b" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(
        SlipstreamError, match=r"weights of bundle .* cannot be read .* export it again"
    ):
        read_bundle(tmp_path / "b")
    (tmp_path / "b" / DESCRIPTION).write_text(json.dumps({"format": 99}))
    with pytest.raises(SlipstreamError, match="not a bundle of format 1; export it again"):
        read_bundle(tmp_path / "b")
