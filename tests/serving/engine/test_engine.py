"""A hit, a miss, an extension and a batch give the scores of the full pass.

Bit for bit where attention is ours, else to 1e-5.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.serving.engine import item_search
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import PrefixBuffer
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_samples import (
    CASES,
    FIRST_ID,
    candidates,
    cut,
    engine,
    history,
    largest_difference,
)

TASKS = ["retrieval", "ranking"]


def allowed(kind):
    return 1e-5 if kind == "sasrec" else 0.0  # torch's own softmax rounds by shape


TIMED = [(kind, bias) for kind, bias in CASES if bias != "none"]
ENCODED = [(*case, {}) for case in CASES] + [
    (*case, {"time_encoding": "functional"}) for case in TIMED
]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("kind", "time_bias", "settings"), ENCODED)
def test_hit_and_extension_equal_the_full_pass(tmp_path, kind, time_bias, settings, task):
    served = engine(tmp_path, kind, task, time_bias, **settings)
    long = (
        [] if kind == "sasrec" else [(700, 350), (2500, 2400)]
    )  # its masked softmax is the plain formula, and slow
    for count, cached in [(1, 1), (2, 1), (7, 7), (9, 8), (17, 16), (40, 16), (300, 299), *long]:
        whole, items = history(count, seed=count), candidates(40)
        full = served.rank(None, whole, items)
        prefix = served.prefill(cut(whole, 0, cached))
        first = served.rank(prefix, cut(whole, cached), items)
        again = served.rank(
            prefix, cut(whole, cached), items
        )  # the first left its own tokens behind the prefix
        grown = served.rank(served.prefill(whole, past=prefix), None, items)
        for scores in (first, again, grown):
            assert largest_difference(scores, full) <= allowed(kind), (count, cached)
    assert np.std(full[served.tasks[0]]) > 1e-3


@pytest.mark.parametrize("length", [16_384, 8_192])
def test_long_histories(tmp_path, length):
    served = engine(tmp_path, task="retrieval", max_len=16_384, blocks=1, position_embedding=False)
    whole, items = history(length), candidates(20)
    full = served.rank(None, whole, items)
    prefix = served.prefill(cut(whole, 0, length - 30))
    assert largest_difference(served.rank(prefix, cut(whole, length - 30), items), full) == 0
    dropped = served.prefill(select(whole, np.r_[0:100, 101 : length - 30]))
    assert largest_difference(served.rank(dropped, cut(whole, length - 30), items), full) > 1e-6


def select(whole, places):
    actions = {name: values[places] for name, values in whole.actions.items()}
    return History(whole.items[places], whole.timestamps[places], actions, whole.user_features)


def token_replaced(served, prefix):
    for layer in prefix.buffer.tensors[1:]:
        layer[3] = layer[5]
    return prefix


def token_dropped(served, prefix):
    buffer = PrefixBuffer(served.shape, prefix.buffer.capacity)
    buffer.copy_tokens(prefix.buffer, prefix.tokens - 1)
    return replace(prefix, buffer=buffer, tokens=prefix.tokens - 1)


def tokens_shifted(served, prefix):
    for layer in prefix.buffer.tensors:
        layer[: prefix.tokens] = layer[: prefix.tokens].roll(1, 0).clone()
    return prefix


def layers_swapped(served, prefix):
    for one, other in zip(prefix.buffer.layers[0], prefix.buffer.layers[-1], strict=True):
        first = one.clone()
        one.copy_(other)
        other.copy_(first)
    return prefix


def another_users(served, prefix):
    return served.prefill(history(prefix.behaviours, seed=77))


def a_time_moved(served, prefix):
    prefix.buffer.times_S[4] -= 500_000_000
    return prefix


def positions_off_by_one(served, prefix):
    whole = history(prefix.behaviours + 5)
    return served.prefill(select(whole, np.r_[0, 0 : prefix.behaviours - 1]))


SPOILERS = [
    token_replaced,
    token_dropped,
    tokens_shifted,
    positions_off_by_one,
    layers_swapped,
    another_users,
    a_time_moved,
]
UNFELT = [
    ("sasrec", a_time_moved),
    ("sasrec", tokens_shifted),
]  # no times; order only through positions, which rows carry


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_a_wrong_time_is_felt_by_a_functional_time_encoding(tmp_path, kind):
    served = engine(tmp_path, kind, "ranking", "own", time_encoding="functional")
    whole, items = history(305), candidates(20)
    full, prefix = served.rank(None, whole, items), served.prefill(cut(whole, 0, 300))
    assert largest_difference(served.rank(prefix, cut(whole, 300), items), full) == 0
    with torch.inference_mode():
        prefix.buffer.times_S[prefix.tokens - 10 : prefix.tokens] -= 3600
    assert largest_difference(served.rank(prefix, cut(whole, 300), items), full) > 0


@pytest.mark.parametrize("length", [20, 300, 2400])
@pytest.mark.parametrize(
    ("kind", "spoil"),
    [(k, s) for k in ("hstu", "fuxi", "sasrec") for s in SPOILERS if (k, s) not in UNFELT],
)
def test_a_wrong_prefix_turns_the_check_red(tmp_path, kind, spoil, length):
    served = engine(tmp_path, kind, "ranking", "none" if kind == "sasrec" else "own")
    length = min(length, 600) if kind == "sasrec" else length
    whole, items = history(length + 5), candidates(20)
    full, prefix = served.rank(None, whole, items), served.prefill(cut(whole, 0, length))
    assert largest_difference(served.rank(prefix, cut(whole, length), items), full) <= allowed(kind)
    with torch.inference_mode():
        spoilt = spoil(served, prefix)
    assert largest_difference(served.rank(spoilt, cut(whole, length), items), full) > 3 * allowed(
        kind
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", ["hstu", "fuxi", "sasrec"])
def test_swapping_one_candidate_changes_no_other_score(tmp_path, kind, task):
    served = engine(tmp_path, kind, task, "none" if kind == "sasrec" else "own")
    whole, items = history(60), candidates(290)  # more than one tile
    other = items.copy()
    other[[3, 270]] = candidates(300)[290:292]
    same = np.ones(290, dtype=bool)
    same[[3, 270]] = False
    for prefix, rest in ((None, whole), (served.prefill(cut(whole, 0, 50)), cut(whole, 50))):
        one, two = served.rank(prefix, rest, items), served.rank(prefix, rest, other)
        for name in served.tasks:
            assert np.array_equal(one[name][same], two[name][same])
            assert (one[name][~same] != two[name][~same]).all()


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_answers_as_its_requests_alone(tmp_path, task):
    served = engine(tmp_path, task=task)
    queries, expected = [], []
    for seed, (count, cached) in enumerate([(30, 20), (300, 299), (5, 0), (9, 4), (50, 50)]):
        whole = history(count, seed)
        prefix = served.prefill(cut(whole, 0, cached)) if cached else None
        recent, items = cut(whole, cached), candidates(10 + seed)
        queries.append(served.make_query(prefix, recent, items, 1_900_000_000))
        expected.append(served.rank(None, whole, items, request_time=1_900_000_000))
    for scores, alone in zip(served.rank_batch(queries), expected, strict=True):
        assert largest_difference(scores, alone) <= 1e-6


def test_many_recent_behaviours_work_in_a_copy(tmp_path):
    served = engine(tmp_path)
    whole, items = history(900), candidates(300)
    prefix = served.prefill(cut(whole, 0, 400))
    full = served.rank(None, whole, items)
    assert largest_difference(served.rank(prefix, cut(whole, 400), items), full) == 0


def test_request_time_is_felt(tmp_path):
    served = engine(tmp_path)
    prefix, last = served.prefill(history(50)), int(history(50).timestamps[-1])
    now, later = (
        served.rank(prefix, None, candidates(5), request_time=last + s) for s in (0, 10**6)
    )
    assert largest_difference(now, served.rank(prefix, None, candidates(5))) == 0
    assert largest_difference(now, later) > 0


@pytest.mark.parametrize("coded_from", [1, 50_000])
@pytest.mark.parametrize("task", TASKS)
def test_retrieve_is_the_exact_best_of_the_catalogue(tmp_path, task, coded_from, monkeypatch):
    monkeypatch.setattr(item_search, "QUANTIZED_FROM", coded_from)
    served, whole = engine(tmp_path, task=task), history(40)
    items, scores = served.retrieve(whole, 10)
    every = FIRST_ID + np.arange(300)
    unseen = np.setdiff1d(every, whole.items)
    expected = served.rank(None, whole, unseen)[served.tasks[0]]
    best = np.argsort(-expected, kind="stable")[:10]
    assert items == unseen[best].tolist()
    assert scores == expected[best].tolist()  # of a search and of a ranking: the same number
    with_seen, _ = served.retrieve(whole, 1000, exclude_seen=False)
    assert sorted(with_seen) == every.tolist()
    without, _ = served.retrieve(whole, 1000, exclude_seen=False, exclude=[*items[:3], "no such"])
    assert sorted(without) == np.setdiff1d(every, items[:3]).tolist()


@pytest.mark.parametrize(
    ("repeat", "found"), [("exclude", ["b", "c/d"]), ("allow", ["a", "b", "c/d"])]
)
def test_a_bundle_says_whether_seen_items_come_again_and_names_items_as_it_was_trained(
    tmp_path, repeat, found
):
    model = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 40}
    rules = {"repeat": repeat, "window": "latest", "sampler": {"max_len": 20}}
    ids = ["a", "b", "c/d"]
    random_bundle(tmp_path / "b", model, task="retrieval", num_items=3, ids=ids, rules=rules)
    served = Engine(tmp_path / "b")
    assert sorted(served.retrieve(History(["a"], [1]), 9)[0]) == found
    assert sorted(served.retrieve(History(["a"], [1]), 9, exclude_seen=True)[0]) == ["b", "c/d"]
    assert (served.rules.max_len, served.max_len) == (20, 40)
    served.prefill(History(["a"] * 40, [1] * 40))  # the engine still takes what the model does


def test_a_past_of_another_history_or_version_is_refused(tmp_path):
    served, other = engine(tmp_path), engine(tmp_path, blocks=1)
    prefix = served.prefill(history(30))
    with pytest.raises(ValueError, match="not a prefix"):
        served.prefill(history(50, seed=1), past=prefix)
    with pytest.raises(ValueError, match="version"):
        other.rank(prefix, None, candidates(3))
    with pytest.raises(ValueError, match="version"):
        other.prefill(history(50), past=prefix)


def test_too_long_or_empty_histories_are_refused(tmp_path):
    served, retrieval = engine(tmp_path, max_len=20), engine(tmp_path, task="retrieval")
    with pytest.raises(BadRequest, match="longer than the model's 20"):
        served.rank(served.prefill(history(20)), history(1), candidates(1))
    with pytest.raises(BadRequest, match="at least one behaviour"):
        retrieval.rank(None, None, candidates(1))
    assert served.rank(None, None, candidates(4))["click"].shape == (4,)
