"""Shares a global batch over ranks evenly. Touch this to add a way of sharing.

No sequence is cut or lost, and the objective (a sum with one global normaliser) does not change:
only the rank that computes a sample does. Costs are predicted: linear in the tokens of a sample
plus quadratic for attention.

    auto            karmarkar_karp where a rank gets few samples of a batch, lpt otherwise
    none            samples in turn; for token-budget batches, one rank after the other up to its
                    share of the tokens
    lpt             again and again the costliest sample to the least loaded rank
    karmarkar_karp  merges the two most uneven partial solutions until one is left; better when
                    samples are few
"""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

Balance = Literal["auto", "none", "lpt", "karmarkar_karp"]
FEW = 32  # samples a rank, up to which `auto` takes the dearer method


@dataclass(frozen=True)
class Cost:
    """Predicted cost of a window of n tokens: constant + linear * n + quadratic * n^2."""

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0

    @classmethod
    def of_hstu(cls, dim: int, heads: int, dqk: int, dv: int) -> "Cost":
        """Count the forward FLOPs of an HSTU layer; causal attention grows with n(n + 1)."""
        attention = heads * (dqk + dv)
        return cls(
            linear=4.0 * dim * attention + 2.0 * dim * heads * dv + attention,
            quadratic=float(attention),
        )

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        lengths = lengths.astype(np.float64)
        return self.constant + self.linear * lengths + self.quadratic * lengths**2


def share_batch(
    lengths: np.ndarray,
    rank: int,
    world_size: int,
    *,
    balance: Balance,
    cost: Cost,
    by_tokens: bool,
) -> np.ndarray:
    """Return the places in the global batch that `rank` computes, ascending."""
    if world_size == 1:
        return np.arange(lengths.size)
    return np.flatnonzero(
        assign(lengths, world_size, balance=balance, cost=cost, by_tokens=by_tokens) == rank
    )


def assign(
    lengths: np.ndarray, world_size: int, *, balance: Balance, cost: Cost, by_tokens: bool = False
) -> np.ndarray:
    """Return the rank of every sample of a global batch; all ranks compute the same."""
    if balance == "auto":
        balance = "karmarkar_karp" if lengths.size <= FEW * world_size else "lpt"
    if balance == "lpt":
        return longest_first(cost(lengths), world_size)
    if balance == "karmarkar_karp":
        return karmarkar_karp(cost(lengths), world_size)
    if by_tokens:
        return fill_by_tokens(lengths, world_size)
    return np.arange(lengths.size) % world_size


def fill_by_tokens(lengths: np.ndarray, world_size: int) -> np.ndarray:
    """Share out consecutive samples with about equal tokens: the middle of a sample decides."""
    ends = np.cumsum(lengths)
    total = max(1, int(ends[-1])) if lengths.size else 1
    return np.minimum((2 * ends - lengths) * world_size // (2 * total), world_size - 1)


def longest_first(costs: np.ndarray, world_size: int) -> np.ndarray:
    """Longest processing time first: samples by descending cost, each to the least loaded rank.

    Ties go to the earlier sample and the lower rank.
    """
    ranks = np.empty(costs.size, dtype=np.int64)
    loads = [(0.0, rank) for rank in range(world_size)]
    for sample in np.argsort(-costs, kind="stable"):
        load, rank = loads[0]
        ranks[sample] = rank
        heapq.heapreplace(loads, (load + float(costs[sample]), rank))
    return ranks


def karmarkar_karp(costs: np.ndarray, world_size: int) -> np.ndarray:
    """The largest differencing method: join the two partitions of widest spread, until one is left.

    Two partitions are joined fullest bin with emptiest.
    """
    ranks = np.zeros(costs.size, dtype=np.int64)
    if costs.size == 0:
        return ranks
    # A partition is its ascending bin sums. `joins` records how two were joined; the loop at the
    # end follows it back from the last partition.
    sums = np.zeros((costs.size, world_size))
    sums[:, -1] = costs
    partitions = list(sums)
    joins: list[tuple[int, int, np.ndarray]] = []
    heap = [(-cost, sample) for sample, cost in enumerate(costs.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        joined = partitions[left] + partitions[right][::-1]
        order = np.argsort(joined, kind="stable")
        partitions.append(joined[order])
        joins.append((left, right, order))
        heapq.heappush(heap, (float(joined.min() - joined.max()), len(partitions) - 1))
    rank_of_bin = {len(partitions) - 1: np.arange(world_size)}
    for index in range(len(joins) - 1, -1, -1):
        left, right, order = joins[index]
        mapped = np.empty(world_size, dtype=np.int64)
        mapped[order] = rank_of_bin.pop(costs.size + index)
        rank_of_bin[left], rank_of_bin[right] = mapped, mapped[::-1]
    for sample, mapped in rank_of_bin.items():
        ranks[sample] = mapped[-1]
    return ranks


def imbalance(costs: np.ndarray, ranks: np.ndarray, world_size: int) -> float:
    """Return how long the mean rank waits for the slowest: (max - mean) / max of the load."""
    loads = np.bincount(ranks, weights=costs, minlength=world_size)
    return float((loads.max() - loads.mean()) / loads.max()) if loads.max() > 0 else 0.0
