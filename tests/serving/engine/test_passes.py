"""Many candidates are scored in steps, as in the full pass, whatever runs between the steps."""

import numpy as np
import pytest

from slipstream.serving.engine.passes import CANDIDATE_TILE, run_steps
from tests.support.serving_samples import (
    FIRST_ID,
    ITEMS,
    candidates,
    cut,
    engine,
    history,
    largest_difference,
)

EVERY = FIRST_ID + np.arange(ITEMS)
MANY = np.concatenate([EVERY, EVERY[::-1], EVERY[:37]])  # two tiles and a rest


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize(("count", "cached"), [(5, 0), (60, 0), (60, 40), (400, 400)])
def test_steps_give_the_scores_of_the_full_pass(tmp_path, task, count, cached):
    served = engine(tmp_path, task=task)
    whole = history(count)
    prefix = served.prefill(cut(whole, 0, cached)) if cached else None
    query = served.make_query(prefix, cut(whole, cached), MANY)
    full = served.rank(None, whole, MANY)
    assert largest_difference(run_steps(served.rank_steps(query)), full) == 0


def test_a_ranking_bundle_scores_without_any_behaviour(tmp_path):
    served = engine(tmp_path)
    query = served.make_query(None, history(0), MANY)
    full = served.rank(None, history(0), MANY)
    assert largest_difference(run_steps(served.rank_steps(query)), full) == 0


def test_another_request_may_use_the_prefix_between_two_steps(tmp_path):
    served, whole = engine(tmp_path), history(200)
    prefix = served.prefill(cut(whole, 0, 190))
    full, other = served.rank(None, whole, MANY), cut(whole, 190, 194)
    expected = served.rank(prefix, other, candidates(30))
    steps, pauses = served.rank_steps(served.make_query(prefix, cut(whole, 190), MANY)), 0
    try:
        while True:
            next(steps)
            pauses += 1
            assert largest_difference(served.rank(prefix, other, candidates(30)), expected) == 0
    except StopIteration as end:
        assert largest_difference(end.value, full) == 0
    tiles = -(-len(MANY) // CANDIDATE_TILE)
    assert pauses == served.shape.layers * tiles
