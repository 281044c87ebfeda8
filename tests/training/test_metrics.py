"""Metrics against plain definitions, ties and degenerate inputs included."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.training import metrics
from slipstream.training.seen import SeenPairs


def brute_force(
    scores: list[int], target: int, excluded: set[int], k: int
) -> tuple[float, float, float]:
    """Average HR, NDCG and MRR over every order that breaks the ties."""
    if target in excluded:
        return 0.0, 0.0, 0.0
    allowed = [i for i in range(len(scores)) if i not in excluded]
    outcomes = []
    for shuffle in itertools.permutations(allowed):
        place = sorted(shuffle, key=lambda i: -scores[i]).index(target) + 1
        outcomes.append(
            (1.0, 1 / math.log2(place + 1), 1 / place) if place <= k else (0.0, 0.0, 0.0)
        )
    return tuple(sum(column) / len(outcomes) for column in zip(*outcomes, strict=True))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_ranking_metrics_are_the_mean_over_all_ways_to_break_ties(scores, data):
    target = data.draw(st.integers(0, len(scores) - 1))
    excluded = data.draw(st.sets(st.integers(0, len(scores) - 1)))
    k = data.draw(st.integers(1, 7))
    items = torch.tensor(sorted(excluded), dtype=torch.int64)
    seen = SeenPairs(torch.zeros_like(items), items)
    gathered = metrics.RankingMetrics(ks=(k,))
    gathered.add(
        *metrics.target_places(
            torch.tensor([scores], dtype=torch.float32), torch.tensor([target]), seen
        )
    )
    result = gathered.result()
    expected = brute_force(scores, target, excluded, k)
    assert [result[f"HR@{k}"], result[f"NDCG@{k}"], result[f"MRR@{k}"]] == pytest.approx(
        list(expected)
    )


def test_a_constant_model_is_not_rewarded():
    gathered = metrics.RankingMetrics(ks=(10,))
    gathered.add(*metrics.target_places(torch.zeros(1, 1000), torch.tensor([0])))
    assert gathered.result()["HR@10"] == pytest.approx(0.01)


def test_diverged_scores_are_refused():
    with pytest.raises(ValueError, match="diverged"):
        metrics.target_places(torch.tensor([[math.nan, 1.0]]), torch.tensor([1]))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_auc_is_the_share_of_ordered_pairs(pairs):
    scores, labels = (
        torch.tensor([float(s) for s, _ in pairs]),
        torch.tensor([float(y) for _, y in pairs]),
    )
    good = [s for s, y in pairs if y]
    bad = [s for s, y in pairs if not y]
    auc = metrics.area_under_curve(scores, labels)
    if not good or not bad:
        assert math.isnan(auc)
    else:
        wins = sum(1.0 if g > b else 0.5 if g == b else 0.0 for g in good for b in bad)
        assert auc == pytest.approx(wins / (len(good) * len(bad)))


def test_grouped_auc_weighs_users_by_impressions_and_skips_one_class_users():
    scores = torch.tensor([0.9, 0.1, 0.2, 0.8, 0.5, 0.7])
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    users = torch.tensor([1, 1, 2, 2, 2, 3])
    # user 1: AUC 1 (2 impressions); user 2: positives .2 and .5 below the negative .8: AUC 0 (3
    # impressions); user 3: one class
    assert metrics.grouped_area_under_curve(scores, labels, users) == pytest.approx(2 / 5)


def test_normalised_entropy_of_the_base_rate_is_one():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert metrics.normalised_entropy(torch.full((4,), 0.25), labels) == pytest.approx(1.0)
    assert metrics.normalised_entropy(torch.tensor([0.9, 0.1, 0.1, 0.1]), labels) < 1
    assert math.isnan(metrics.normalised_entropy(torch.full((2,), 0.5), torch.ones(2)))


def test_a_place_counts_ties_half_and_a_missed_target_as_infinite():
    above_S, tied_S = torch.tensor([0, 3, metrics.MISSED]), torch.tensor([0, 2, 0])
    assert metrics.mean_places(above_S, tied_S).tolist() == [1.0, 5.0, float("inf")]
