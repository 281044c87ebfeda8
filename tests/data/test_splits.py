"""Splits against plain loops over the behaviours of each user."""

import numpy as np
import pytest

from slipstream.data.sampler import SamplerConfig, TrainingSampler, evaluation_batches
from slipstream.data.splits import Split, seconds_of
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import store_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng, rows = np.random.default_rng(3), []
    for user in range(40):
        for time in np.sort(rng.integers(100 * (user % 5), 1_000, size=1 + user % 13)):
            rows.append((user, int(rng.integers(30)), int(time)))
    return store_of(tmp_path_factory.mktemp("splits"), rows)


def log_times(store, user):
    return store.timestamps_N[store.offsets_U1[user] : store.offsets_U1[user + 1]].tolist()


def parts(store, split):
    """How many behaviours of each user train, and the places held out, as lists."""
    held_out = [split.held_out(store, which) for which in ("validation", "test")]
    return [
        (int(trains), *[list(range(p.begins_U[user], p.ends_U[user])) for p in held_out])
        for user, trains in enumerate(split.train_lengths(store))
    ]


def test_the_last_behaviours_of_each_log_that_is_long_enough(store):
    for user, found in enumerate(parts(store, Split(validation=2, test=1))):
        n = len(log_times(store, user))
        assert found == ((n - 3, [n - 3, n - 2], [n - 1]) if n > 3 else (n, [], []))


@pytest.mark.parametrize(
    "split",
    [
        Split(by="time", validation_from=500, test_from="1970-01-01T00:12:00"),
        Split(by="time", validation=0.2, test=0.1),
        Split(by="time", validation=0, test=0.25),
        Split(by="time", validation=0.25, test=0),
    ],
)
def test_everything_from_a_moment_on_by_a_plain_loop(store, split):
    first, second = 500, 720
    if split.test_from is None:
        ordered = [*sorted(store.timestamps_N.tolist()), float("inf")]
        count = store.num_behaviours
        test, validation = round(count * split.test), round(count * split.validation)
        first, second = ordered[count - test - validation], ordered[count - test]
    for user, found in enumerate(parts(store, split)):
        times = log_times(store, user)
        assert found[0] == sum(time < first for time in times)
        assert found[1] == [p for p, t in enumerate(times) if first <= t < second and p > 0]
        assert found[2] == [p for p, t in enumerate(times) if t >= second and p > 0]


def test_a_share_of_the_users_does_not_train_and_is_asked_for_its_last_behaviour(store):
    found = parts(store, Split(by="users", validation=0.3, test=0.2))
    groups = {"train": 0, "validation": 0, "test": 0}
    for user, (trains, validation, test) in enumerate(found):
        n = len(log_times(store, user))
        assert trains in (0, n) and not (validation and test)
        if trains:
            assert not validation and not test
        elif n > 1:
            assert validation + test == [n - 1]
        kind = "train" if trains else "validation" if validation else "test"
        groups[kind] += 1
    assert min(groups.values()) >= 3
    more = Split(by="users", validation=0.3, test=0.4)  # the same test users, and more
    chosen = [p[2] for p in found]
    assert all(b[2] for a, b in zip(chosen, parts(store, more), strict=True) if a)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize("which", ["validation", "test"])
@pytest.mark.parametrize(
    "split", [Split(2, 3), Split(0.2, 0.3, "time"), Split(0.3, 0.3, by="users"), Split(7, 5)]
)
def test_evaluation_asks_for_each_held_out_behaviour_once(store, task, which, split):
    asked = []
    for batch in evaluation_batches(store, which, max_len=4, task=task, holdout=split):
        assert batch.lengths_B.max() <= 4
        for b, user in enumerate(batch.sample_ids_B.tolist()):
            for t in range(int(batch.offsets_B1[b]), int(batch.offsets_B1[b + 1])):
                place = int(batch.first_positions_B[b]) + t - int(batch.offsets_B1[b])
                if batch.supervised_T[t]:
                    asked.append((user, place + (task == "retrieval")))
                    item = batch.next_items_T[t] if task == "retrieval" else batch.items_T[t]
                    assert store.items_N[store.offsets_U1[user] + asked[-1][1]] == int(item)
    part = split.held_out(store, which)
    assert asked == [
        (user, place)
        for user in range(store.num_users)
        for place in range(part.begins_U[user], part.ends_U[user])
    ]


@pytest.mark.parametrize("split", [Split(0.2, 0.3, "time"), Split(0.3, 0.3, "users")])
def test_training_never_sees_what_is_held_out(store, split):
    sampler = TrainingSampler(store, SamplerConfig(max_len=50), seed=1, split=split)
    batch = sampler.next_batch()
    lengths = split.train_lengths(store)
    users = batch.sample_ids_B.tolist()
    assert sorted(users) == [u for u, n in enumerate(lengths) if n > 1]
    for b, user in enumerate(users):
        part = slice(int(batch.offsets_B1[b]), int(batch.offsets_B1[b + 1]))
        log = store.items_N[store.offsets_U1[user] :][: lengths[user]].tolist()
        assert batch.items_T[part].tolist() == log[:-1]
        assert batch.next_items_T[part].tolist() == log[1:]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"validation": -1}, "0 or more behaviours"),
        ({"validation": 0.5}, "0 or more behaviours"),
        ({"by": "time"}, "needs shares of the behaviours"),
        ({"by": "users", "validation": 0.5, "test": 0.5}, "needs shares of the users"),
        ({"by": "users", "test_from": 3}, "need split.by=time"),
        ({"by": "time", "test_from": 3}, "give both"),
        ({"by": "time", "validation_from": 4, "test_from": 3}, "must not be later"),
        ({"by": "time", "validation_from": "soon", "test_from": 3}, "'soon' is no moment"),
        ({"by": "first"}, "last, time, users"),
    ],
)
def test_a_split_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Split(**wrong)


def test_a_log_without_times_is_not_split_by_time(store):
    store.meta["timed"] = False
    try:
        with pytest.raises(SlipstreamError, match="cannot be split by time"):
            Split(0.1, 0.1, "time").train_lengths(store)
    finally:
        del store.meta["timed"]


def test_a_moment_is_seconds_or_iso_text():
    assert seconds_of(17) == 17 and seconds_of("1970-01-02") == 86_400
    assert seconds_of("1970-01-01T01:00:00+01:00") == 0
