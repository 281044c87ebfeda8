"""Metrics as exact expectations: a tie counts as the average over all ways to break it.

Ranking metrics of one query depend only on how many items score above the target and how many tie
with it. With t ties the target stands at each of the t + 1 places with equal chance, so every
metric is an average over those places. Touch this to add a metric.
"""

import math

import torch

from slipstream.training.seen import SeenPairs

KS = (1, 5, 10, 50, 200)
MISSED = 1 << 40  # the place of a target that cannot be recommended: beyond every k


def target_places(
    scores_SN: torch.Tensor, targets_S: torch.Tensor, seen: SeenPairs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the items that score above each target, and those that tie (int64 [S] each).

    `seen` are items a query may not be answered with: they do not compete, and a target among them
    is `MISSED`. Overwrites their scores.
    """
    if not torch.isfinite(scores_SN).all():
        raise ValueError(
            "scores hold NaN or infinity: the model has diverged, lower the learning rate"
        )
    if seen is not None:
        scores_SN[seen.rows_P, seen.items_P] = -torch.inf
    target_S1 = scores_SN.gather(1, targets_S.unsqueeze(1))
    missed_S = target_S1.squeeze(1).isneginf()
    above_S = (scores_SN > target_S1).sum(1).masked_fill(missed_S, MISSED)
    tied_S = ((scores_SN == target_S1).sum(1) - 1).masked_fill(missed_S, 0)
    return above_S, tied_S


def mean_places(above_S: torch.Tensor, tied_S: torch.Tensor) -> torch.Tensor:
    """Return each target's place (float64 [S], the best is 1): ties count half, missed is inf."""
    places_S = above_S.double() + 1 + tied_S.double() / 2
    return places_S.masked_fill(above_S == MISSED, torch.inf)


def _mean_gain(
    gain_by_place: torch.Tensor, above_S: torch.Tensor, tied_S: torch.Tensor, k: int
) -> torch.Tensor:
    """Average `gain_by_place[: k]` over the places above … above + tied, for each query."""
    total_K1 = torch.cat([torch.zeros(1, dtype=torch.float64), gain_by_place[:k].cumsum(0)])
    last_S = (above_S + tied_S + 1).clamp(max=k)
    return (total_K1[last_S] - total_K1[above_S.clamp(max=k)]) / (tied_S + 1)


class RankingMetrics:
    """HR, NDCG and MRR at several k, added up batch by batch."""

    def __init__(self, ks: tuple[int, ...] = KS) -> None:
        self.ks = ks
        places = torch.arange(1, max(ks) + 1, dtype=torch.float64)
        self._gains = {
            "HR": torch.ones_like(places),
            "NDCG": 1 / torch.log2(places + 1),
            "MRR": 1 / places,
        }
        self._sums = {f"{name}@{k}": 0.0 for name in self._gains for k in ks}
        self.count = 0

    def add(self, above_S: torch.Tensor, tied_S: torch.Tensor) -> None:
        """Count queries by the places that `target_places` found for their targets."""
        self.count += above_S.numel()
        for name, gain in self._gains.items():
            for k in self.ks:
                self._sums[f"{name}@{k}"] += float(_mean_gain(gain, above_S, tied_S, k).sum())

    def sums(self) -> list[float]:
        """Return the counts as numbers that can be added up over ranks."""
        return [float(self.count), *self._sums.values()]

    def take_over(self, sums: list[float]) -> None:
        """Continue from `sums`, those of all ranks."""
        self.count, self._sums = int(sums[0]), dict(zip(self._sums, sums[1:], strict=True))

    def result(self) -> dict[str, float]:
        """Return the means over all queries; zeros where there was none."""
        return {name: value / max(self.count, 1) for name, value in self._sums.items()}


def area_under_curve(scores_S: torch.Tensor, labels_S: torch.Tensor) -> float:
    """Compute AUC by mid-ranks (a tie counts one half); NaN when only one class is present."""
    positives, negatives = int((labels_S > 0.5).sum()), int((labels_S <= 0.5).sum())
    if not positives or not negatives:
        return math.nan
    _, inverse_S, counts_U = scores_S.double().unique(return_inverse=True, return_counts=True)
    middle_U = counts_U.cumsum(0).double() - (counts_U.double() - 1) / 2
    rank_sum = float(middle_U[inverse_S][labels_S > 0.5].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def grouped_area_under_curve(
    scores_S: torch.Tensor, labels_S: torch.Tensor, users_S: torch.Tensor
) -> float:
    """Compute GAUC: users' AUCs weighted by impressions, without users of one class only."""
    order_S = users_S.argsort(stable=True)
    sizes = users_S[order_S].unique_consecutive(return_counts=True)[1].tolist()
    weighted, weight = 0.0, 0
    for scores, labels in zip(
        scores_S[order_S].split(sizes), labels_S[order_S].split(sizes), strict=True
    ):
        auc = area_under_curve(scores, labels)
        if not math.isnan(auc):
            weighted += auc * scores.numel()
            weight += scores.numel()
    return weighted / weight if weight else math.nan


def normalised_entropy(probabilities_S: torch.Tensor, labels_S: torch.Tensor) -> float:
    """Compute NE: log-loss divided by that of predicting the base rate; below 1 is better."""
    base = float(labels_S.double().mean()) if labels_S.numel() else 0.0
    if base in (0.0, 1.0):
        return math.nan
    p_S, y_S = probabilities_S.double().clamp(1e-12, 1 - 1e-12), labels_S.double()
    log_loss = -(y_S * p_S.log() + (1 - y_S) * (1 - p_S).log()).mean()
    return float(log_loss) / -(base * math.log(base) + (1 - base) * math.log(1 - base))
