"""How a global batch is shared over ranks so that none waits for another.

No sequence is cut, none is lost, the objective (a sum with one global normaliser) does not change:
only who computes what.

`none` deals samples out in turn, or, for token-budget batches, fills one rank after the other up to
its share of the tokens (sample counts then differ, which the global normaliser weighs rightly).
`lpt` gives the costliest sample to the least loaded rank, again and again. `karmarkar_karp` merges
the two most uneven partial solutions until one is left: better when samples are few. Costs are
predicted: linear in the tokens of a sample plus quadratic for attention.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

Balance = Literal["none", "lpt", "karmarkar_karp"]


@dataclass(frozen=True)
class Cost:
    """Predicted cost of a window of n tokens: linear * n + quadratic * n^2."""

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def of_hstu(cls, dim: int, heads: int, dqk: int, dv: int) -> "Cost":
        """Forward FLOPs of an HSTU layer: projections and output are linear, causal attention goes
        with n(n + 1).
        """
        attention = heads * (dqk + dv)
        return cls(
            linear=4.0 * dim * attention + 2.0 * dim * heads * dv + attention,
            quadratic=float(attention),
        )

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        lengths = lengths.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths**2


def share_batch(
    lengths: np.ndarray,
    rank: int,
    world_size: int,
    *,
    balance: Balance,
    cost: Cost,
    by_tokens: bool,
) -> np.ndarray:
    """Places in the global batch that `rank` computes, ascending. Every rank works out the same
    sharing.
    """
    if world_size == 1:
        return np.arange(lengths.size)
    return np.flatnonzero(
        assign(lengths, world_size, balance=balance, cost=cost, by_tokens=by_tokens) == rank
    )


def assign(
    lengths: np.ndarray, world_size: int, *, balance: Balance, cost: Cost, by_tokens: bool = False
) -> np.ndarray:
    """The rank of every sample of a global batch."""
    if balance == "lpt":
        return longest_first(cost(lengths), world_size)
    if balance == "karmarkar_karp":
        return karmarkar_karp(cost(lengths), world_size)
    if by_tokens:
        return fill_by_tokens(lengths, world_size)
    return np.arange(lengths.size) % world_size


def fill_by_tokens(lengths: np.ndarray, world_size: int) -> np.ndarray:
    """Consecutive runs with about equal tokens: a sample belongs to the rank in whose share of the
    tokens its middle lies.
    """
    ends = np.cumsum(lengths)
    total = max(1, int(ends[-1])) if lengths.size else 1
    return np.minimum((2 * ends - lengths) * world_size // (2 * total), world_size - 1)


def longest_first(costs: np.ndarray, world_size: int) -> np.ndarray:
    """Longest processing time first: descending cost, each to the least loaded rank; ties by place,
    then by rank.
    """
    ranks = np.empty(costs.size, dtype=np.int64)
    loads = [(0.0, rank) for rank in range(world_size)]
    for sample in np.argsort(-costs, kind="stable"):
        load, rank = loads[0]
        ranks[sample] = rank
        heapq.heapreplace(loads, (load + float(costs[sample]), rank))
    return ranks


def karmarkar_karp(costs: np.ndarray, world_size: int) -> np.ndarray:
    """The largest differencing method: join the two partitions of widest spread, fullest bin with
    emptiest, until one is left.
    """
    ranks = np.zeros(costs.size, dtype=np.int64)
    if costs.size == 0:
        return ranks
    # A partition is its ascending bin sums. How two were joined is kept aside, and followed back
    # from the last one at the end.
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
    """What the mean rank waits for the slowest one, as a share of the step: (max - mean) / max."""
    loads = np.bincount(ranks, weights=costs, minlength=world_size)
    return float((loads.max() - loads.mean()) / loads.max()) if loads.max() > 0 else 0.0
