"""Slices: a fixed mix, contiguous owners, and numbers without gaps for the keys of a range."""

import pytest
import torch

from slipstream.ops.counter_random import mix64_int
from slipstream.tables.slices import SLICES, Placement, SliceLayout, slice_of, slice_order


def test_slices_are_fixed_for_ever():
    keys = torch.tensor([0, 1, 2, 12345, 2**63 - 1])
    assert slice_of(keys).tolist() == [(mix64_int(int(key)) % 2**64) >> 48 for key in keys]
    assert slice_of(keys).tolist() == [
        57888,
        37130,
        38744,
        8721,
        10855,
    ]  # stored tables depend on these very numbers


def test_slices_are_even():
    counts = torch.bincount(slice_of(torch.arange(1 << 20)) >> 8, minlength=256)
    assert counts.min() > 3_600 and counts.max() < 4_600  # 4096 expected, standard deviation 64


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
def test_every_slice_has_one_owner_and_owners_ascend(world):
    placement = Placement(world)
    keys = torch.arange(5000) * 987_654_321
    owners = placement.owner_of(keys)
    slices = slice_of(keys)
    for rank in range(world):
        low, high = placement.slices(rank)
        assert torch.equal(owners == rank, (slices >= low) & (slices < high))
    assert placement.slices(0)[0] == 0 and placement.slices(world - 1)[1] == SLICES
    assert all(placement.slices(r)[1] == placement.slices(r + 1)[0] for r in range(world - 1))


def test_owners_keep_the_keys_shape():
    assert Placement(3).owner_of(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5)
    for world in (0, SLICES + 1):
        with pytest.raises(ValueError, match="ranks"):
            Placement(world)
    with pytest.raises(ValueError, match="ranks are"):
        Placement(2).slices(2)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 70_001, (1 << 20) + 77])
@pytest.mark.parametrize(("low", "high"), [(0, SLICES), (20_000, 20_001), (30_000, 60_000)])
def test_layout_numbers_the_keys_of_a_range_without_gaps(rows, low, high):
    layout = SliceLayout(rows, low, high)
    slices = slice_of(torch.arange(rows))
    own = ((slices >= low) & (slices < high)).nonzero().squeeze(1)
    assert torch.equal(layout.keys(), own) and layout.count == own.numel()
    assert torch.equal(layout.locate(own), torch.arange(own.numel()))
    shuffled = own[torch.randperm(own.numel(), generator=torch.Generator().manual_seed(1))]
    assert torch.equal(own[layout.locate(shuffled)], shuffled)


def test_layout_refuses_keys_of_others_and_bad_bounds():
    layout = SliceLayout(1000, *Placement(2).slices(1))
    stranger = int((Placement(2).owner_of(torch.arange(1000)) == 0).nonzero()[0])
    with pytest.raises(IndexError, match=f"key {stranger} lies in a slice this rank does not own"):
        layout.locate(torch.tensor([int(layout.keys()[0]), stranger]))
    with pytest.raises(ValueError, match="ascend"):
        SliceLayout(10, 5, 5)


def test_slice_order_sorts_by_slice_then_key():
    keys = torch.arange(3000)
    ordered = keys[slice_order(keys)]
    pairs = list(zip(slice_of(ordered).tolist(), ordered.tolist(), strict=True))
    assert pairs == sorted(pairs)
