"""The sampler: windows as the plain definition says, the same order for everyone, and a restart at
the very next sample.
"""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from slipstream.data.sampler import (
    SamplerConfig,
    Split,
    TrainingSampler,
    evaluation_batches,
    stochastic_lengths,
)
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import store_with_lengths

LENGTHS = [1, 2, 3, 4, 5, 9, 12, 30, 7, 6, 3, 15, 21, 2, 8, 11, 4, 4, 13, 5]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_with_lengths(tmp_path_factory.mktemp("sampler"), LENGTHS)


def log_of(store, user):
    part = slice(store.offsets_U1[user], store.offsets_U1[user + 1])
    return (
        store.items_N[part].tolist(),
        store.timestamps_N[part].tolist(),
        store.actions["click"][part].tolist(),
    )


def same(one, other):
    pairs = [(getattr(one, name), getattr(other, name)) for name in vars(one)]
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    dicts = [(a[key], b[key]) for a, b in pairs if isinstance(a, dict) for key in a]
    return all(torch.equal(a, b) for a, b in tensors + dicts)


def windows(batch):
    """Per user: (user, first position, items, times, next items and times, supervised, clicks)."""
    for b in range(batch.num_users):
        part = slice(int(batch.offsets_B1[b]), int(batch.offsets_B1[b + 1]))
        tensors = (
            batch.items_T,
            batch.timestamps_T,
            batch.next_items_T,
            batch.next_timestamps_T,
            batch.supervised_T,
            batch.actions["click"],
        )
        yield (
            int(batch.sample_ids_B[b]),
            int(batch.first_positions_B[b]),
            *(tensor[part].tolist() for tensor in tensors),
        )


def test_a_retrieval_window_is_the_most_recent_pairs_of_the_training_part(store):
    sampler = TrainingSampler(store, SamplerConfig(max_len=6, batch_size=7), seed=3, split=Split())
    seen = []
    for batch in sampler.epoch_batches():
        for user, first, items, times, next_items, next_times, supervised, clicks in windows(batch):
            log, when, clicked = log_of(store, user)
            end = len(log) - 2 if len(log) > 2 else len(log)  # too short to split: all of it trains
            begin = max(0, end - 7)
            assert first == begin
            assert items == log[begin : end - 1] and next_items == log[begin + 1 : end]
            assert times == when[begin : end - 1] and next_times == when[begin + 1 : end]
            assert clicks == clicked[begin : end - 1] and all(supervised)
            seen.append(user)
    # A pair needs two behaviours: users with one, or with one left after the split, cannot train.
    assert sorted(seen) == [user for user, n in enumerate(LENGTHS) if (n - 2 if n > 2 else n) >= 2]


def test_a_ranking_window_is_the_behaviours_themselves(store):
    sampler = TrainingSampler(
        store, SamplerConfig(max_len=6, batch_size=7), seed=3, split=Split(), task="ranking"
    )
    for batch in sampler.epoch_batches():
        for user, first, items, _, next_items, next_times, supervised, clicks in windows(batch):
            log, when, clicked = log_of(store, user)
            end = len(log) - 2 if len(log) > 2 else len(log)
            assert (
                items == log[first:end]
                and clicks == clicked[first:end]
                and len(items) == min(6, end)
                and all(supervised)
            )
            assert next_items == [
                *log[first + 1 : end],
                -1,
            ]  # the held-out behaviour is not even whispered
            assert next_times == [*when[first + 1 : end], when[end - 1]]


@pytest.mark.parametrize("which", ["validation", "test"])
@pytest.mark.parametrize("split", [Split(), Split(2, 3)])
@pytest.mark.parametrize("size", [{"batch_size": 3}, {"token_budget": 11}])
def test_evaluation_asks_for_the_held_out_behaviours_only(store, which, split, size):
    held_out = split.validation if which == "validation" else split.test
    asked = []
    for batch in evaluation_batches(store, which, max_len=5, holdout=split, **size):
        for user, first, items, _, next_items, _, supervised, _ in windows(batch):
            log, _, _ = log_of(store, user)
            place = first + len(items)
            assert items == log[max(0, place - 5) : place] and first == max(0, place - 5)
            assert next_items == log[first + 1 : place + 1]
            assert supervised == [False] * (len(items) - 1) + [True]
            asked.append((user, place))
    ends = {
        user: n - (split.test if which == "validation" else 0) for user, n in enumerate(LENGTHS)
    }
    assert asked == [
        (user, place)
        for user, n in enumerate(LENGTHS)
        if n > split.validation + split.test
        for place in range(ends[user] - held_out, ends[user])
    ]


def test_an_evaluated_window_begins_where_it_is_told(store):
    rule = {"start": lambda behaviours: behaviours // 2, "task": "ranking"}
    for batch in evaluation_batches(store, "test", max_len=5, **rule):
        for user, first, items, *_ in windows(batch):
            log, _, _ = log_of(store, user)
            assert first == len(log) // 2 and items == log[first:]


def test_nothing_is_evaluated_where_no_log_can_be_split(store):
    assert not list(evaluation_batches(store, "test", max_len=5, holdout=Split(1, 1_000)))


def test_ranking_evaluation_reads_the_held_out_behaviours_and_judges_only_them(store):
    for batch in evaluation_batches(store, "validation", max_len=5, batch_size=4, task="ranking"):
        for user, _, items, _, next_items, _, supervised, _ in windows(batch):
            log, _, _ = log_of(store, user)
            assert items == log[: len(log) - 1][-5:] and next_items[-1] == -1
            assert supervised == [False] * (len(items) - 1) + [True]


CONFIGS = [
    SamplerConfig(max_len=8, batch_size=4),
    SamplerConfig(max_len=8, token_budget=20),
    SamplerConfig(max_len=12, batch_size=5, stochastic_length=1.5),
    SamplerConfig(max_len=12, token_budget=24, stochastic_length=1.6, balance="lpt"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_resume_at_every_point_gives_the_very_next_batches(store, config):
    whole = TrainingSampler(store, config, seed=11, split=Split())
    states, batches = [], []
    for _ in range(3 * whole.steps_per_epoch):
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append(whole.next_batch())
    assert whole.epoch >= 2
    for start, state in enumerate(states):
        resumed = TrainingSampler(store, config, seed=11, split=Split())
        resumed.load_state_dict(state)
        assert all(same(resumed.next_batch(), expected) for expected in batches[start : start + 3])


def test_a_state_of_another_sampler_is_refused(store, tmp_path):
    state = TrainingSampler(store, CONFIGS[0], seed=11).state_dict()
    with pytest.raises(SlipstreamError, match="seed"):
        TrainingSampler(store, CONFIGS[0], seed=12).load_state_dict(state)
    with pytest.raises(SlipstreamError, match="max_len"):
        TrainingSampler(store, SamplerConfig(max_len=9, batch_size=4), seed=11).load_state_dict(
            state
        )
    with pytest.raises(SlipstreamError, match="store"):
        TrainingSampler(
            store_with_lengths(tmp_path, LENGTHS, seed=1), CONFIGS[0], seed=11
        ).load_state_dict(state)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_each_global_batch_and_take_equally_many_steps(store, config, world):
    alone = TrainingSampler(store, config, seed=5)
    ranks = [
        TrainingSampler(store, config, seed=5, rank=rank, world_size=world) for rank in range(world)
    ]
    assert {rank.steps_per_epoch for rank in ranks} == {alone.steps_per_epoch}
    for _ in range(2 * alone.steps_per_epoch):
        everything = Counter(repr(window) for window in windows(alone.next_batch()))
        shared = Counter(repr(window) for rank in ranks for window in windows(rank.next_batch()))
        assert shared == everything


def test_epochs_differ_and_seeds_decide(store):
    def order(seed, epochs=1):
        sampler = TrainingSampler(store, SamplerConfig(max_len=8, batch_size=4), seed=seed)
        return [
            [u for batch in sampler.epoch_batches() for u in batch.sample_ids_B.tolist()]
            for _ in range(epochs)
        ]

    first, second = order(1, 2)
    assert first != second and sorted(first) == sorted(second)
    assert order(1) == [first] and order(2) != [first]


def test_a_token_budget_is_kept_and_filled(store):
    sampler = TrainingSampler(store, SamplerConfig(max_len=10, token_budget=25), seed=5)
    batches = list(sampler.epoch_batches())
    assert len(batches) == sampler.steps_per_epoch
    assert all(batch.num_tokens <= 25 for batch in batches)
    assert all(
        one.num_tokens + int(next_one.lengths_B[0]) > 25
        for one, next_one in itertools.pairwise(batches)
    )
    alone = TrainingSampler(store, SamplerConfig(max_len=10, token_budget=3), seed=5)
    assert all(batch.num_tokens <= 3 or batch.num_users == 1 for batch in alone.epoch_batches())


def test_stochastic_length_cuts_with_the_rules_probability():
    draws = np.random.default_rng(0).random(200_000)
    lengths = stochastic_lengths(np.full(200_000, 200), draws, max_len=256, alpha=1.6)
    threshold = int(256**0.8)
    assert set(lengths) == {threshold, 200}
    assert (lengths == 200).mean() == pytest.approx(256**1.6 / 200**2, abs=0.005)
    short = np.arange(1, threshold + 1)
    assert (stochastic_lengths(short, np.full(short.size, 0.999), 256, 1.6) == short).all()


def test_config_refuses_what_it_does_not_know():
    for wrong in (
        {"max_length": 3},
        {"batch_size": 3, "token_budget": 4},
        {"stochastic_length": 3.0},
        {"batch_size": 0},
        {"balance": "x"},
    ):
        with pytest.raises(ValidationError):
            SamplerConfig(**wrong)
    assert SamplerConfig().batch_size == 128 and SamplerConfig(token_budget=9).batch_size is None


def test_users_too_short_for_min_len_are_left_out(store):
    sampler = TrainingSampler(store, SamplerConfig(max_len=8, min_len=5), seed=0)
    assert all((batch.lengths_B >= 5).all() for batch in sampler.epoch_batches())
    with pytest.raises(SlipstreamError, match="no user has enough"):
        TrainingSampler(store, SamplerConfig(max_len=80, min_len=50), seed=0)


def window_targets(batch):
    """(user, place of the target) of every supervised token."""
    for b, user in enumerate(batch.sample_ids_B.tolist()):
        first, start = int(batch.first_positions_B[b]), int(batch.offsets_B1[b])
        for t in range(start, int(batch.offsets_B1[b + 1])):
            assert bool(batch.supervised_T[t])
            yield user, first + t - start + 1


@pytest.mark.parametrize("windows", [1, 2, 100])
@pytest.mark.parametrize("world", [1, 3])
def test_several_windows_use_a_long_history_whole_and_each_target_once(store, windows, world):
    config, targets = SamplerConfig(max_len=4, batch_size=5, windows=windows), []
    for rank in range(world):
        sampler = TrainingSampler(store, config, seed=3, rank=rank, world_size=world)
        for batch in sampler.epoch_batches():
            assert max(batch.lengths_B.tolist(), default=0) <= 4
            targets += window_targets(batch)
    wanted = [
        (user, place)
        for user, length in enumerate(Split().train_lengths(store).tolist())
        for place in range(max(1, length - 4 * windows), length)
    ]
    assert sorted(targets) == wanted


def test_windows_lie_end_to_end_from_the_end_of_the_log(store):
    config = SamplerConfig(max_len=4, batch_size=1000, windows=100, min_len=2)
    batch = TrainingSampler(store, config, seed=3).next_batch()
    found = {}
    for user, first, length in zip(
        batch.sample_ids_B.tolist(),
        batch.first_positions_B.tolist(),
        batch.lengths_B.tolist(),
        strict=True,
    ):
        found.setdefault(user, set()).add((first, length))
    for user, length in enumerate(Split().train_lengths(store).tolist()):
        end, expected = length - 1, set()
        while end >= 2:
            expected.add((max(0, end - 4), min(4, end)))
            end -= 4
        assert found.get(user, set()) == expected


def test_several_windows_resume_anywhere_and_are_part_of_the_sampler_state(store):
    config = SamplerConfig(max_len=4, batch_size=5, windows=3, stochastic_length=1.5)
    whole = TrainingSampler(store, config, seed=11)
    states, batches = [], []
    for _ in range(2 * whole.steps_per_epoch):
        states.append(whole.state_dict())
        batches.append(whole.next_batch())
    for place in (1, whole.steps_per_epoch - 1, whole.steps_per_epoch + 1):
        resumed = TrainingSampler(store, config, seed=11)
        resumed.load_state_dict(states[place])
        assert torch.equal(resumed.next_batch().items_T, batches[place].items_T)
    one = TrainingSampler(store, config.model_copy(update={"windows": 1}), seed=11)
    assert "windows" not in one.state_dict()  # as before there could be more
    with pytest.raises(SlipstreamError, match="windows"):
        TrainingSampler(store, config, seed=11).load_state_dict(one.state_dict())


def test_shared_targets_are_those_of_all_windows_of_the_global_batch(store):
    config = SamplerConfig(max_len=4, batch_size=9, windows=3)
    whole = TrainingSampler(store, config, seed=2, share_targets=True).next_batch()
    assert torch.equal(whole.global_targets_P, whole.next_items_T)
