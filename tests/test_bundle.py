"""A bundle comes back as it was written; its version is a digest of all that decides a score."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.block_files import StreamedTensor
from slipstream.bundle import (
    BLOCKS,
    DESCRIPTION,
    ITEMS,
    SEARCH,
    WEIGHTS,
    read_bundle,
    write_bundle,
)
from slipstream.errors import SlipstreamError
from slipstream.ops.row_readers import TensorRows
from slipstream.ops.topk import quantize_rows

RECIPE = {"task": "retrieval", "model": {"dim": 4}, "tables": {"rule": "adamw"}, "seed": 1}
SIZES = {"items": 3}
LAST = torch.tensor([19_999])


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
        values = tensors() if values is None else values
        return write_bundle(tmp_path / "b", recipe, sizes, values, items, force=True, **figures)

    first = version(step=1)
    assert first == version(step=2, metrics={"HR@10": 0.3}) == version(RECIPE | {"seed": 9})
    others = [
        version(RECIPE | {"model": {"dim": 8}}),
        version(sizes={"items": 4}),
        version(values=tensors(2.0)),
        version(values={"model/v": tensors()["model/w"], "tables/item": torch.zeros(4, 3)}),
        version(RECIPE | {"repeat": "allow"}),
        version(RECIPE | {"window": "stepped"}),
        version(RECIPE | {"sampler": {"max_len": 5}}),
        version(user_labels={"age": ["", "young"]}),
        version(number_edges={"user.income": [1.5]}),
    ]
    assert len({first, *others}) == 10
    same = {"max_len": 5, "batch_size": 9}
    assert version(RECIPE | {"sampler": same}) == others[6]


def test_a_bundle_says_how_it_answers(tmp_path, items):
    recipe = RECIPE | {"model": {"max_len": 50}}
    write_bundle(tmp_path / "plain", recipe, SIZES, tensors(), items)
    ruled = {"repeat": "allow", "window": "latest", "sampler": {"max_len": 20}}
    write_bundle(tmp_path / "ruled", recipe | ruled, SIZES | {"timed": False}, tensors(), items)
    bundle = read_bundle(tmp_path / "ruled")
    assert (bundle.repeat, bundle.window, bundle.max_len) == ("allow", "latest", 20)
    assert not bundle.timed and read_bundle(tmp_path / "plain").timed


def test_a_bundle_of_the_first_format_answers_as_it_did(tmp_path, items):
    recipe = RECIPE | {"model": {"max_len": 50}, "sampler": {"max_len": 20}}  # no rules yet
    write_bundle(tmp_path / "b", recipe, SIZES, tensors(), items)
    description = json.loads((tmp_path / "b" / DESCRIPTION).read_text()) | {"format": 1}
    del description["digests"]
    (tmp_path / "b" / DESCRIPTION).write_text(json.dumps(description))
    bundle = read_bundle(tmp_path / "b")
    assert (bundle.repeat, bundle.window, bundle.max_len) == ("exclude", "stepped", 50)


def test_others_may_read_a_bundle_as_the_umask_says(tmp_path, items):
    before = os.umask(0o027)
    try:
        write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "b").iterdir()}
    assert modes == dict.fromkeys((DESCRIPTION, WEIGHTS, ITEMS, BLOCKS), 0o640)


def test_only_an_older_bundle_is_replaced(tmp_path, items):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("not ours")
    with pytest.raises(SlipstreamError, match="left alone"):
        write_bundle(tmp_path / "theirs", RECIPE, SIZES, tensors(), items, force=True)
    write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    with pytest.raises(SlipstreamError, match="exists already"):
        write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(2.0), items)
    with pytest.raises(SlipstreamError, match="its own input"):
        write_bundle(
            tmp_path / "b", RECIPE, SIZES, tensors(), items, force=True, inputs=[tmp_path / "b"]
        )
    assert (read_bundle(tmp_path / "b").part("model")["w"] == 1).all()


@pytest.mark.parametrize("early", [1, 2])
def test_bundles_of_the_formats_before_still_open(tmp_path, items, early):
    write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    description = json.loads((tmp_path / "b" / DESCRIPTION).read_text()) | {"format": early}
    del description["digests"]
    (tmp_path / "b" / DESCRIPTION).write_text(json.dumps(description))
    (tmp_path / "b" / BLOCKS).unlink()
    save_file({name: value.contiguous() for name, value in tensors().items()}, tmp_path / "w")
    (tmp_path / "w").rename(tmp_path / "b" / WEIGHTS)
    bundle = read_bundle(tmp_path / "b")
    assert torch.equal(bundle.part("tables")["item"], tensors()["tables/item"])
    assert bundle.rows("item").shape == (4, 3) and bundle.search_codes() is None


def test_rows_are_streamed_and_read_as_safetensors_reads_them(tmp_path, items):
    rows_ND = torch.randn(70_000, 16, generator=torch.Generator().manual_seed(1))
    streamed = StreamedTensor((70_000, 16), torch.float32, lambda: iter(rows_ND.split(9_999)))
    versions = [
        write_bundle(
            tmp_path / name, RECIPE, SIZES, {**tensors(), "tables/item": value}, items, search=rows
        )
        for name, value, rows in (
            ("whole", rows_ND, None),
            ("streamed", streamed, TensorRows(rows_ND)),
        )
    ]
    assert versions[0] == versions[1]
    bundle = read_bundle(tmp_path / "streamed")
    assert torch.equal(load_file(bundle.directory / WEIGHTS)["tables/item"], rows_ND)
    some_C = torch.tensor([69_999, 3, 3])
    assert torch.equal(bundle.rows("item").take(some_C), rows_ND[some_C])
    assert torch.equal(torch.cat([tile for _, tile in bundle.rows("item").tiles()]), rows_ND)
    codes, expected = bundle.search_codes(), quantize_rows(rows_ND)
    assert all(torch.equal(vars(codes)[name], vars(expected)[name]) for name in vars(expected))


@pytest.mark.parametrize("name", [WEIGHTS, SEARCH])
def test_a_changed_byte_is_found_at_the_first_touch_of_its_block(tmp_path, items, name):
    rows_ND = torch.ones(20_000, 16)
    given = {"model/w": torch.ones(2), "tables/item": rows_ND}
    write_bundle(tmp_path / "b", RECIPE, SIZES, given, items, search=TensorRows(rows_ND))
    changed = tmp_path / "b" / name
    with changed.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01")
    bundle = read_bundle(tmp_path / "b")  # the last rows were not touched
    assert (bundle.part("model")["w"] == 1).all()
    assert torch.equal(bundle.rows("item").take(torch.arange(9)), rows_ND[:9])
    touch = bundle.search_codes if name == SEARCH else lambda: bundle.rows("item").take(LAST)
    bundle.check_files(1_000)  # too large to be checked whole
    for call in (touch, touch, lambda: bundle.check_files(1 << 30)):
        with pytest.raises(SlipstreamError, match=rf"{name} was changed .* export the bundle aga"):
            call()


@pytest.mark.parametrize("early", [b"1", b"2"])
def test_a_bundle_does_not_become_an_older_one_to_pass_unchecked(tmp_path, items, early):
    write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    path = tmp_path / "b" / DESCRIPTION
    path.write_bytes(path.read_bytes().replace(b'"format": 3', b'"format": ' + early, 1))
    with pytest.raises(SlipstreamError, match=rf"{DESCRIPTION} was changed after it was written"):
        read_bundle(tmp_path / "b")


@pytest.mark.parametrize("name", [DESCRIPTION, ITEMS, BLOCKS])
def test_a_change_of_what_is_read_at_opening_is_found_then(tmp_path, items, name):
    write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    path = tmp_path / "b" / name
    content = path.read_bytes()
    if name == DESCRIPTION:
        path.write_bytes(content.replace(b'"dim": 4', b'"dim": 8'))
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SlipstreamError, match=rf"{name} was changed after it was written"):
        read_bundle(tmp_path / "b")


def test_what_is_no_bundle_is_one_sentence(tmp_path, items):
    with pytest.raises(
        SlipstreamError, match=r"is not a bundle .* make one with `slipstream export"
    ):
        read_bundle(tmp_path)
    write_bundle(tmp_path / "b", RECIPE, SIZES, tensors(), items)
    weights = tmp_path / "b" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(SlipstreamError, match=rf"{WEIGHTS} was changed .* export the bundle again"):
        read_bundle(tmp_path / "b")
    (tmp_path / "b" / DESCRIPTION).write_text(json.dumps({"format": 99}))
    with pytest.raises(
        SlipstreamError, match="not a bundle of format 1 or 2 or 3; export it again"
    ):
        read_bundle(tmp_path / "b")
