"""Explanations equal the scores of shortened histories, ranked from their start."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.history.user_history import History, join_histories
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.leave_one_out import Explanation, explain_steps
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_samples import CASES, candidates, cut, engine, history


def explain(served: Engine, given: History, item: int, task: str, count: int = 200) -> Explanation:
    query = served.make_query(None, given, [item])
    steps = explain_steps(served, query, task, count)
    while True:
        try:
            assert next(steps) >= 0
        except StopIteration as end:
            return end.value


def without(given: History, place: int) -> History:
    """The history with one behaviour left out."""
    parts = [cut(given, 0, place), cut(given, place + 1)]
    joined = join_histories([part for part in parts if len(part)] or [cut(given, 0, 0)])
    return replace(joined, user_features=given.user_features)


def brute_force(served: Engine, given: History, item: int, task: str, place: int) -> float:
    moment = int(given.timestamps[-1])
    return float(served.rank(None, without(given, place), [item], request_time=moment)[task][0])


@pytest.mark.parametrize(("kind", "time_bias"), CASES)
@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_every_behaviour_left_out_scores_as_the_history_without_it(
    tmp_path: Path, kind: str, time_bias: str, task: str
):
    served = engine(tmp_path, kind, task, time_bias)
    item, name = int(candidates(1)[0]), served.tasks[-1]
    for count in (2, 7, 41):
        given = history(count)
        found = explain(served, given, item, name)
        assert (found.first, len(found.without)) == (0, count)
        whole = served.rank(None, given, [item], request_time=int(given.timestamps[-1]))
        assert found.score == pytest.approx(float(whole[name][0]), abs=1e-5)
        expected = [brute_force(served, given, item, name, place) for place in range(count)]
        np.testing.assert_allclose(found.without, expected, rtol=0, atol=1e-5)
        assert np.ptp(expected) > 1e-4  # every part of a history is felt


def test_only_the_newest_behaviours_are_explained_where_fewer_are_asked_for(tmp_path: Path):
    served, given, item = engine(tmp_path), history(90), int(candidates(1)[0])
    some = explain(served, given, item, "like", 20)
    assert (some.first, len(some.without)) == (70, 20)
    everything = explain(served, given, item, "like")
    np.testing.assert_allclose(some.without, everything.without[70:], rtol=0, atol=1e-6)


def test_nothing_is_left_of_a_history_of_one(tmp_path: Path):
    item = int(candidates(1)[0])
    assert explain(engine(tmp_path, task="retrieval"), history(1), item, "score").without == [None]
    ranked = engine(tmp_path)
    [left] = explain(ranked, history(1), item, "click").without
    empty = replace(cut(history(1), 0, 0), user_features={"age": 2})
    moment = int(history(1).timestamps[-1])
    assert left == pytest.approx(
        float(ranked.rank(None, empty, [item], request_time=moment)["click"][0]), abs=1e-5
    )


def test_an_empty_history_is_refused(tmp_path: Path):
    with pytest.raises(BadRequest, match="empty history"):
        explain(engine(tmp_path), cut(history(1), 0, 0), int(candidates(1)[0]), "click")


def test_the_check_can_fail(tmp_path: Path):
    """Scores of histories without a neighbouring behaviour are told apart."""
    served, given, item = engine(tmp_path), history(41), int(candidates(1)[0])
    found = explain(served, given, item, "like")
    shifted = [brute_force(served, given, item, "like", place) for place in range(1, 41)]
    assert np.abs(np.array(found.without[:-1]) - shifted).max() > 1e-4
