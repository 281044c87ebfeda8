"""Between real gloo ranks rows arrive where they are requested, gradients at their owners."""

import pytest
import torch
import torch.distributed as dist

from slipstream.tables.collection import TableCollection
from slipstream.tables.embedding_table import first_rows
from slipstream.tables.exchange import Exchange, by_channel, distinct, gradient, segments
from slipstream.tables.slices import Placement
from tests.support.ranks_fixtures import run_ranks
from tests.support.table_samples import SIZES, batch_keys, shared_tables


def loss_of(lookups, step):
    """A loss whose gradient differs from row to row."""
    total = torch.zeros((), dtype=torch.float64)
    for lookup in lookups.values():
        for which in range(len(lookup.inverses)):
            rows = lookup.rows_UD[lookup.inverses[which]]
            total = total + (rows.double() * (1.0 + which + step)).sin().sum()
    return total


def one_rank(world, steps):
    """The same steps with everybody's keys in one process: the oracle."""
    alone = TableCollection(shared_tables())
    for step in range(steps):
        parts = [alone.lookup(batch_keys(rank, step)) for rank in range(world)]
        sum(loss_of(part, step) for part in parts).backward()
        alone.apply(parts, 0.1)
    return alone


def check_steps(rank, world, steps):
    """Train over the ranks; returns the largest difference from the oracle of this rank's rows."""
    mine = TableCollection(
        shared_tables(), Exchange({t.name: t for t in shared_tables()}, dist.group.WORLD)
    )
    for step in range(steps):
        keys = batch_keys(rank, step)
        lookups = mine.lookup(keys)
        for name, lists in keys.items():
            for which, wanted in enumerate(lists):
                assert torch.equal(lookups[name].unique_U[lookups[name].inverses[which]], wanted)
        loss_of({name: lookups[name] for name in keys}, step).backward()
        mine.apply(lookups, 0.1)
    alone, worst = one_rank(world, steps), 0.0
    for name, (rows, _) in SIZES.items():
        keys = torch.arange(rows)
        if name != "small":
            keys = keys[Placement(world).owner_of(keys) == rank]
        left, right = mine[name].read(keys), alone[name].read(keys)
        for a, b in [
            (left.weights_UD, right.weights_UD),
            *((left.state[k], right.state[k]) for k in left.state),
        ]:
            worst = max(worst, float((a.double() - b.double()).abs().max()) if a.numel() else 0.0)
    return worst


@pytest.mark.system
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_end_where_one_rank_ends(tmp_path, world):
    assert max(run_ranks(world, f"{__name__}:check_steps", tmp_path, steps=4)) < 1e-12


def check_rows_and_messages(rank, world):
    """Rows arrive bit for bit, in one message per peer, also over another communicator."""
    sent = []
    original = dist.all_to_all_single

    def counting(output, input_, *splits, **options):
        sent.append(input_.numel() * input_.element_size())
        return original(output, input_, *splits, **options)

    every = {table.name: table for table in shared_tables(torch.float32)}
    exchange = Exchange(every, dist.group.WORLD)
    twin = exchange.on(dist.new_group(list(range(world))))
    keys, answers = batch_keys(rank, 0), []
    for each in (exchange, twin):
        dist.all_to_all_single = counting
        try:
            route = each.route(keys)
            lookups = each.answer(
                route, {name: every[name].gather(owned) for name, owned in route.owned.items()}
            )
            for lookup in lookups.values():
                lookup.rows_UD.grad = torch.ones_like(lookup.rows_UD)
            answers.append(each.collect(route, lookups))
        finally:
            dist.all_to_all_single = original
        for name in keys:
            wanted = first_rows(
                5, name, lookups[name].unique_U, SIZES[name][1], 0.035, torch.float32
            )
            assert torch.equal(lookups[name].rows_UD, wanted)
        for name, owned in route.owned.items():
            assert torch.equal(owned, owned.unique()) and (
                name == "small" or (Placement(world).owner_of(owned) == rank).all()
            )
    assert (
        len(sent) == 2 * 4
    )  # counts, keys, rows, gradients: four messages per peer however many tables
    assert all(
        torch.equal(a, b)
        for name in answers[0]
        for a, b in zip(answers[0][name], answers[1][name], strict=True)
    )
    return {
        name: [keys.tolist(), grads[:, 0].tolist()] for name, (keys, grads) in answers[0].items()
    }


def check_parts(rank, world):
    """Batches routed together travel in two messages, and get the routes they get alone."""
    every = {table.name: table for table in shared_tables(torch.float32)}
    exchange, sent = Exchange(every, dist.group.WORLD, half_lists={"item": frozenset([1])}), []
    parts = [batch_keys(rank, step) for step in range(3)] + [{}]
    alone, original = [exchange.route(keys) for keys in parts], dist.all_to_all_single

    def counting(*arguments, **options):
        sent.append(arguments)
        return original(*arguments, **options)

    dist.all_to_all_single = counting
    try:
        together = exchange.route_parts(parts)
    finally:
        dist.all_to_all_single = original
    assert len(sent) == 2 and len(together) == len(alone)
    for one, other in zip(together, alone, strict=True):
        assert (one.sent_WC, one.received_WC) == (other.sent_WC, other.received_WC)
        assert one.owned.keys() == other.owned.keys() and one.requests.keys() == (
            other.requests.keys()
        )
        for name, request in one.requests.items():
            assert torch.equal(one.owned[name], other.owned[name])
            twin = other.requests[name]
            for mine, its in (
                ([request.unique_U], [twin.unique_U]),
                (request.inverses, twin.inverses),
                (request.grouped, twin.grouped),
                (request.places, twin.places),
            ):
                assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    return sum(keys.numel() for route in together for keys in route.owned.values())


@pytest.mark.system
def test_batches_routed_together_get_the_routes_they_get_alone(tmp_path):
    assert all(run_ranks(2, f"{__name__}:check_parts", tmp_path))


@pytest.mark.system
def test_rows_arrive_exactly_in_one_message_per_peer(tmp_path):
    answers = run_ranks(2, f"{__name__}:check_rows_and_messages", tmp_path)
    for name in ("item", "genre", "user"):
        askers = {}
        for rank in (0, 1):
            for key in set(
                torch.cat(
                    [k.flatten() for k in batch_keys(rank, 0).get(name, [torch.empty(0)])]
                ).tolist()
            ):
                askers[key] = askers.get(key, 0) + 1
        found = {
            key: grad
            for keys, grads in (answer[name] for answer in answers)
            for key, grad in zip(*(keys, grads), strict=True)
        }
        assert (
            found == askers
        )  # every key has one owner, and its gradient counts each asking rank once


def test_one_rank_sends_nothing():
    one = TableCollection(shared_tables())
    lookups = one.lookup(batch_keys(0, 0))
    assert one.exchange.communicator is None and torch.equal(
        lookups.route.owned["item"], lookups["item"].unique_U
    )


@pytest.mark.parametrize("repeats", [1, 40])  # 40: many more keys than rows, so they are counted
@pytest.mark.parametrize("num_rows", [None, 12, 10_000])
def test_distinct_keys_are_the_same_by_counting_and_by_sorting(num_rows, repeats):
    lists = [torch.tensor([7, 3, 7]).repeat(repeats), torch.tensor([[11, 3], [0, 7]])]
    lists[1] = lists[1].repeat(repeats, 1)
    unique_U, places = distinct(lists, num_rows)
    assert unique_U.tolist() == [0, 3, 7, 11]
    assert [unique_U[each].tolist() for each in places] == [each.tolist() for each in lists]


@pytest.mark.parametrize("repeats", [1, 40])
def test_a_table_whose_rows_are_all_used_needs_no_places(repeats):
    lists = [torch.tensor([1, 0, 2, 1]).repeat(repeats)]
    unique_U, places = distinct(lists, 3)
    assert unique_U.tolist() == [0, 1, 2] and places[0] is lists[0]


def test_a_received_buffer_is_cut_by_rank_and_joined_by_channel():
    flat, counts_WC, widths = torch.arange(11), [[1, 2], [0, 3]], [1, 2]
    cut = [(w, c, part.tolist()) for w, c, part in segments(flat, counts_WC, widths)]
    assert cut == [(0, 0, [0]), (0, 1, [1, 2, 3, 4]), (1, 0, []), (1, 1, [5, 6, 7, 8, 9, 10])]
    assert [part.tolist() for part in by_channel(flat, counts_WC, widths)] == [
        [0],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]


def test_rows_that_the_backward_pass_did_not_reach_have_zero_gradients():
    one = TableCollection(shared_tables())
    lookups = one.lookup(batch_keys(0, 0))
    assert not gradient(lookups["item"]).any()
    lookups["item"].rows(0).sum().backward()
    assert gradient(lookups["item"]).sum() == 8 * 40
