"""How a global batch is shared over ranks so that none waits for another.

No sequence is cut, none is lost, the objective (a sum with one global normaliser) does not change: only who computes what.

`none` deals samples out in turn, or, for token-budget batches, fills one rank after the other up to its share of the tokens
(sample counts then differ, which the global normaliser weighs rightly). `lpt` gives the costliest sample to the least loaded
rank, again and again. `karmarkar_karp` merges the two most uneven partial solutions until one is left: better when samples are few.
Costs are predicted: linear in the tokens of a sample plus quadratic for attention.
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

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        lengths = lengths.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths**2


def share_batch(lengths: np.ndarray, rank: int, world_size: int, *, balance: Balance, cost: Cost, by_tokens: bool) -> np.ndarray:
    """Places in the global batch that `rank` computes, ascending. Every rank works out the same sharing."""
    if world_size == 1:
        return np.arange(lengths.size)
    return np.flatnonzero(assign(lengths, world_size, balance=balance, cost=cost, by_tokens=by_tokens) == rank)


def assign(lengths: np.ndarray, world_size: int, *, balance: Balance, cost: Cost, by_tokens: bool = False) -> np.ndarray:
    """The rank of every sample of a global batch."""
    if balance == "lpt":
        return longest_first(cost(lengths), world_size)
    if balance == "karmarkar_karp":
        return karmarkar_karp(cost(lengths), world_size)
    if by_tokens:
        return fill_by_tokens(lengths, world_size)
    return np.arange(lengths.size) % world_size


def fill_by_tokens(lengths: np.ndarray, world_size: int) -> np.ndarray:
    """Consecutive runs with about equal tokens: a sample belongs to the rank in whose share of the tokens its middle lies."""
    ends = np.cumsum(lengths)
    total = max(1, int(ends[-1])) if lengths.size else 1
    return np.minimum((2 * ends - lengths) * world_size // (2 * total), world_size - 1)


def longest_first(costs: np.ndarray, world_size: int) -> np.ndarray:
    """Longest processing time first: descending cost, each to the least loaded rank; ties by place, then by rank."""
    ranks = np.empty(costs.size, dtype=np.int64)
    loads = [(0.0, rank) for rank in range(world_size)]
    for sample in np.argsort(-costs, kind="stable"):
        load, rank = loads[0]
        ranks[sample] = rank
        heapq.heapreplace(loads, (load + float(costs[sample]), rank))
    return ranks


def karmarkar_karp(costs: np.ndarray, world_size: int) -> np.ndarray:
    """The largest differencing method: join the two partitions of widest spread, fullest bin with emptiest, until one is left."""
    ranks = np.zeros(costs.size, dtype=np.int64)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for sample, cost in enumerate(costs.tolist()):
        bins: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(world_size - 1)] + [(cost, [sample])]
        heap.append((-cost, sample, bins))
    heapq.heapify(heap)
    joined = costs.size
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        bins = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        bins.sort(key=lambda bin: bin[0])
        heapq.heappush(heap, (bins[0][0] - bins[-1][0], joined, bins))
        joined += 1
    if heap:
        for rank, (_, members) in enumerate(heap[0][2]):
            ranks[members] = rank
    return ranks
