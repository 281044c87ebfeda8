"""Negatives in 16 bits: what is rounded, and every byte that travels between two real ranks."""

import pytest
import torch
import torch.distributed as dist

from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Exchange
from slipstream.tables.memory_table import MemoryTable, first_rows
from slipstream.tables.row_optimizers import RowwiseAdagrad
from slipstream.tables.transport import half_rounded
from tests.support.ranks_fixtures import run_ranks

ROWS, WIDTH = 3000, 16


def key_lists(rank):
    draw = torch.Generator().manual_seed(rank)
    history, targets = (torch.randint(0, ROWS, (60,), generator=draw) for _ in range(2))
    negatives = torch.randint(0, ROWS, (60, 20), generator=draw)
    negatives[:5, :3] = history[:15].view(5, 3)  # some keys are both
    return [history, targets, negatives]


def check_bytes(rank, world):
    """Values and bytes of one exchange with and without 16 bits for the third list."""
    sent = {}
    original = Communicator.swap

    def counting(self, values, send_sizes, receive_sizes, purpose):
        others = [size for place, size in enumerate(send_sizes) if place != self.rank]
        sent[name][purpose] = sent[name].get(purpose, 0) + sum(others) * values.dtype.itemsize
        return original(self, values, send_sizes, receive_sizes, purpose)

    table = MemoryTable("item", ROWS, WIDTH, RowwiseAdagrad(), seed=5)
    lists, answers = key_lists(rank), {}
    Communicator.swap = counting
    try:
        for name, half in (("exact", None), ("half", {"item": frozenset([2])})):
            sent[name] = {}
            exchange = Exchange({"item": table}, dist.group.WORLD, half_lists=half)
            route = exchange.route({"item": lists})
            lookups = exchange.answer(route, {"item": table.gather(route.owned["item"])})
            lookup = lookups["item"]
            lookup.rows_UD.grad = torch.linspace(-1e-4, 1e-4, lookup.rows_UD.numel()).view_as(
                lookup.rows_UD
            )
            answers[name] = lookup, exchange.collect(route, lookups)["item"]
    finally:
        Communicator.swap = original
    lookup, (owned, grads) = answers["half"]
    only = ~torch.isin(lookup.unique_U, torch.cat([lists[0], lists[1]]))
    born = first_rows(5, "item", lookup.unique_U, WIDTH, 0.035, torch.float32)
    assert torch.equal(lookup.rows_UD[~only], born[~only]) and torch.equal(
        lookup.rows_UD[only], half_rounded(born[only])
    )
    assert not torch.equal(half_rounded(born[only]), born[only])
    assert torch.equal(answers["exact"][0].rows_UD, born) and torch.equal(
        owned, answers["exact"][1][0]
    )
    largest = float(answers["exact"][1][1].abs().max())
    error = float((grads - answers["exact"][1][1]).abs().max()) / largest
    away = {
        key: int((exchange.placement.owner_of(lookup.unique_U[mask]) != rank).sum())
        for key, mask in (("only", only), ("both", ~only))
    }
    return {"sent": sent, "away": away, "error": error}


@pytest.mark.system
def test_negatives_travel_in_half_the_bytes_and_everything_else_exactly(tmp_path):
    answers = run_ranks(2, f"{__name__}:check_bytes", tmp_path)
    asked_of = {0: answers[1]["away"], 1: answers[0]["away"]}
    for rank, answer in enumerate(answers):
        sent, away, served = answer["sent"], answer["away"], asked_of[rank]
        assert (
            sent["exact"]["keys"] == sent["half"]["keys"] == 8 * (away["only"] + away["both"])
        )  # a key that is both is sent once
        for kind, count in (("rows", served), ("gradients", away)):
            assert sent["exact"][kind] == 4 * WIDTH * (count["only"] + count["both"])
            assert (
                sent["half"][kind] == WIDTH * (2 * count["only"] + 4 * count["both"]) + 2
            )  # two bytes: the message's scale
        assert 0 < answer["error"] < 1e-3
        assert away["only"] > 100 and away["both"] > 20


def test_rounding_never_overflows():
    rows = torch.tensor([[1e6, -1e9, 3.0, 1e-9]])
    assert half_rounded(rows).tolist() == [[65504.0, -65504.0, 3.0, 0.0]]
