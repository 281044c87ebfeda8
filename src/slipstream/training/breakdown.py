"""Metrics by groups of queries: by length of the history, and by popularity of the target.

Each quantity is cut at its quartiles. Touch this to look at a model from another side.
"""

from typing import Any

import numpy as np
import torch

from slipstream.training.held_out import HeldOut
from slipstream.training.metrics import RankingMetrics
from slipstream.training.ranks import Ranks

SHOWN = ("HR@10", "NDCG@10")


class Breakdown:
    """HR@10 and NDCG@10 by quartiles of history length and of the target's training count."""

    def __init__(self, held_out: HeldOut, counts_N: torch.Tensor) -> None:
        self._counts_N = counts_N
        self._edges = {
            name: _quartiles(values_S.numpy())
            for name, values_S in self._values(held_out.known_S, held_out.items_S).items()
        }
        self._ranges = {
            name: _group_ranges(values_S.numpy(), self._edges[name])
            for name, values_S in self._values(held_out.known_S, held_out.items_S).items()
        }
        self._found = {
            name: [RankingMetrics(ks=(10,)) for _ in ranges]
            for name, ranges in self._ranges.items()
        }

    def _values(self, known_S: torch.Tensor, items_S: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"history length": known_S, "target popularity": self._counts_N[items_S]}

    def add(
        self,
        known_S: torch.Tensor,
        items_S: torch.Tensor,
        above_S: torch.Tensor,
        tied_S: torch.Tensor,
    ) -> None:
        """Count queries by the places of their targets."""
        for name, values_S in self._values(known_S, items_S).items():
            group_S = np.searchsorted(self._edges[name], values_S.numpy())
            for group, found in enumerate(self._found[name]):
                mine_S = torch.from_numpy(group_S == group)
                found.add(above_S[mine_S], tied_S[mine_S])

    def result(self, ranks: Ranks) -> list[dict[str, Any]]:
        """Return one row per group, over all ranks. Collective."""
        rows = []
        for name, groups in self._found.items():
            for found, (low, high) in zip(groups, self._ranges[name], strict=True):
                found.take_over(ranks.sum(found.sums()))
                figures = {figure: found.result()[figure] for figure in SHOWN}
                rows.append({"by": name, "from": low, "to": high, "users": found.count, **figures})
        return rows


def _quartiles(values: np.ndarray) -> np.ndarray:
    """Return the largest value of each group but the last; equal values stay together."""
    if not values.size:
        return np.empty(0, dtype=np.int64)
    edges = np.unique(np.quantile(values, (0.25, 0.5, 0.75), method="lower"))
    return edges[edges < values.max()]


def _group_ranges(values: np.ndarray, edges: np.ndarray) -> list[tuple[int, int]]:
    groups = np.searchsorted(edges, values)
    parts = (values[groups == group] for group in range(edges.size + 1))
    return [(int(part.min()), int(part.max())) for part in parts if part.size]
