"""Sharing a batch over ranks: nothing lost, nothing cut, the same for every rank, and even."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.balance import (
    Cost,
    assign,
    fill_by_tokens,
    imbalance,
    karmarkar_karp,
    longest_first,
    share_batch,
)
from slipstream.data.sampler import SamplerConfig, TrainingSampler
from slipstream.data.synthetic import Synthetic, draw_lengths, with_lengths
from tests.support.data_fixtures import store_with_lengths

HOWS = [("auto", False), ("none", False), ("none", True), ("lpt", False), ("karmarkar_karp", False)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 500), max_size=40),
    world=st.integers(1, 9),
    how=st.sampled_from(HOWS),
)
def test_every_sample_goes_to_exactly_one_rank(lengths, world, how):
    lengths_B = np.array(lengths, dtype=np.int64)
    options = {"balance": how[0], "by_tokens": how[1], "cost": Cost(1.0, 0.01)}
    parts = [share_batch(lengths_B, rank, world, **options) for rank in range(world)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert all(
        np.array_equal(part, share_batch(lengths_B, rank, world, **options))
        for rank, part in enumerate(parts)
    )


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 60), min_size=1, max_size=8), world=st.integers(2, 3))
def test_both_methods_stay_within_their_bounds_of_the_best(costs, world):
    costs_B = np.array(costs, dtype=np.float64)

    def makespan(ranks):
        return np.bincount(ranks, weights=costs_B, minlength=world).max()

    best = min(
        makespan(np.array(ranks)) for ranks in itertools.product(range(world), repeat=len(costs))
    )
    bound = 4 / 3 - 1 / (3 * world)
    assert best <= makespan(longest_first(costs_B, world)) <= bound * best + 1e-9
    assert best <= makespan(karmarkar_karp(costs_B, world)) <= bound * best + 1e-9


def test_karmarkar_karp_beats_longest_first_on_the_textbook_case():
    costs_B = np.array([8.0, 7, 6, 5, 4])
    loads = [
        np.bincount(method(costs_B, 2), weights=costs_B).max()
        for method in (longest_first, karmarkar_karp)
    ]
    assert loads == [17, 16]


def test_token_shares_are_runs_of_about_equal_tokens():
    lengths_B = np.array([5, 5, 5, 5, 20, 1, 1, 1, 1, 1, 15])
    ranks = fill_by_tokens(lengths_B, 3)
    assert (np.diff(ranks) >= 0).all() and np.bincount(ranks, weights=lengths_B).tolist() == [
        20,
        20,
        20,
    ]


def test_balanced_ranks_on_long_synthetic_lengths_are_within_a_percent():
    drawn = draw_lengths(with_lengths(Synthetic(), "kuairand-1k"), 20_000, np.random.default_rng(1))
    lengths, cost = np.minimum(drawn, 4096), Cost.of_hstu(512, 8, 64, 64)
    for world, allowed in ((2, 0.01), (64, 0.024)):
        batches = [
            lengths[begin : begin + 8 * world] for begin in range(0, 20 * 8 * world, 8 * world)
        ]
        batches = [batch for batch in batches if batch.size == 8 * world]
        waits = {
            how: np.mean(
                [
                    imbalance(cost(b), assign(b, world, balance=how, cost=cost), world)
                    for b in batches
                ]
            )
            for how in ("none", "lpt")
        }
        assert waits["lpt"] <= allowed < waits["none"]


def test_cost_of_hstu_is_the_flops_written_out():
    dim, heads, dqk, dv, n = 48, 3, 16, 8, 7
    written_out = (
        2 * n * dim * (2 * heads * dqk + 2 * heads * dv)
        + n * (n + 1) * heads * (dqk + dv)
        + 2 * n * heads * dv * dim
    )
    assert Cost.of_hstu(dim, heads, dqk, dv)(np.array([n]))[0] == written_out


def test_the_sampler_shares_by_cost_and_resumes_on_another_number_of_ranks(tmp_path):
    store = store_with_lengths(tmp_path, [3 + 7 * (user % 9) for user in range(60)])
    config = SamplerConfig(
        max_len=100, batch_size=16, balance="lpt", cost_linear=1.0, cost_quadratic=0.1
    )
    two = [TrainingSampler(store, config, seed=1, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        batches = [sampler.next_batch() for sampler in two]
        loads = [Cost(1.0, 0.1)(batch.lengths_B.numpy()).sum() for batch in batches]
        assert max(loads) - min(loads) < 0.06 * max(loads)
    four = [TrainingSampler(store, config, seed=1, rank=rank, world_size=4) for rank in range(4)]
    for sampler in four:
        sampler.load_state_dict(two[0].state_dict())
    users = [
        sorted(u for sampler in ranks for u in sampler.next_batch().sample_ids_B.tolist())
        for ranks in (two, four)
    ]
    assert users[0] == users[1] and len(users[0]) == 16


def test_auto_balances_by_the_cost_it_is_given(tmp_path):
    store = store_with_lengths(tmp_path, [3 + 31 * (user % 9) for user in range(60)])
    cost, config = Cost(1.0, 0.3, 5.0), SamplerConfig(max_len=300, batch_size=16)
    assert config.balance == "auto" and config.cost_or(cost) is cost
    assert config.cost_or(Cost()) == Cost(1.0, 0.0)
    own = SamplerConfig(cost_quadratic=2.0).cost_or(cost)
    assert (own, SamplerConfig(cost_linear=3.0).cost_or(cost)) == (Cost(1.0, 2.0), Cost(3.0))

    def unevenness(balance):
        chosen = config.model_copy(update={"balance": balance})
        ranks = [
            TrainingSampler(store, chosen, seed=1, rank=rank, world_size=2, cost=cost)
            for rank in range(2)
        ]
        loads = [float(cost(rank.next_batch().lengths_B.numpy()).sum()) for rank in ranks]
        return (max(loads) - min(loads)) / max(loads)

    assert unevenness("auto") == unevenness("karmarkar_karp") < 0.03 < unevenness("none")


def test_auto_takes_the_cheaper_method_for_many_samples():
    lengths = np.random.default_rng(0).integers(1, 500, 4000)
    options = {"cost": Cost(1.0, 0.1)}
    many, few = lengths, lengths[:40]
    for part, method in ((many, "lpt"), (few, "karmarkar_karp")):
        found = assign(part, 4, balance="auto", **options)
        assert np.array_equal(found, assign(part, 4, balance=method, **options))
