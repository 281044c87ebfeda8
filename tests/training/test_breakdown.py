"""Groups of queries: cut at quartiles, equal values together, nothing lost."""

import torch

from slipstream.training.breakdown import Breakdown
from slipstream.training.held_out import HeldOut
from slipstream.training.ranks import ALONE


def test_queries_are_grouped_by_quartiles_and_equal_values_stay_together():
    known = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    items = torch.tensor([0, 0, 0, 0, 0, 0, 1, 2])
    slices = Breakdown(HeldOut(known, known, items, known), torch.tensor([9, 4, 0]))
    above = torch.tensor([0, 100, 0, 100, 100, 100, 0, 0])
    slices.add(known, items, above, torch.zeros_like(above))
    rows = slices.result(ALONE)
    found = [(row["by"], row["from"], row["to"], row["users"], row["HR@10"]) for row in rows]
    assert found == [
        ("history length", 1, 2, 2, 0.5),
        ("history length", 3, 4, 2, 0.5),
        ("history length", 5, 6, 2, 0.0),
        ("history length", 7, 8, 2, 1.0),
        ("target popularity", 0, 4, 2, 1.0),
        ("target popularity", 9, 9, 6, 1 / 3),
    ]


def test_no_queries_make_no_groups():
    none = torch.empty(0, dtype=torch.int64)
    assert Breakdown(HeldOut(none, none, none, none), torch.tensor([1])).result(ALONE) == []
