"""What a step computes and which keys it needs: lengths, balance, unique keys, cuts.

Lengths come from a prepared store or from a lognormal law. Keys come from how often the items of a
store occur, or from Zipf's law. How many different keys a batch, a micro-batch or a whole group
has is an expected value over that distribution; where a store is given, how much a clustered cut
saves is measured by cutting real batches. Touch this when a batch is described in another way.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from slipstream.data.balance import Balance, Cost, assign
from slipstream.data.store import SequenceStore
from slipstream.models.flops import training_flops
from slipstream.models.model_config import ModelConfig
from slipstream.pipeline.clustering import cluster_samples, key_inflation

_BINS = 2_000  # of the popularity of items: ranks that are close count as equal
_BATCHES_CUT = 2  # real batches that are clustered to measure key inflation


class LengthLaw(BaseModel):
    """Lengths of histories: lognormal, rounded, between `shortest` and `longest`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: float = Field(default=200.0, gt=0)
    sigma: float = Field(default=0.8, ge=0, le=5, description="0: all are equal")
    shortest: int = Field(default=1, ge=1)
    longest: int = Field(default=4096, ge=1)


class Workload(BaseModel):
    """A model and its batches on one worker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    samples: int = Field(default=32, ge=1, le=65_536, description="of a worker and step")
    negatives: int = Field(
        default=128, ge=0, description="rows drawn a token, or a step where shared"
    )
    shared_negatives: bool = Field(
        default=True, description="drawn once a step instead of for each token"
    )
    store: str | None = Field(
        default=None, description="prepared data: its lengths and item counts"
    )
    lengths: LengthLaw = LengthLaw()
    items: int = Field(default=1_000_000, ge=1, description="rows of the item table")
    zipf: float = Field(default=1.05, ge=0, le=3, description="exponent of the popularity of items")
    balance: Balance = Field(default="lpt", description="how a global batch is shared over workers")
    state_bytes: int = Field(
        default=4, ge=0, description="optimiser state of a row that lies beside it"
    )

    @cached_property
    def _store(self) -> SequenceStore | None:
        return None if self.store is None else SequenceStore.open(Path(self.store))

    @cached_property
    def _popularity(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities of items, and how many items have each."""
        if self._store is not None:
            counts_N = np.bincount(self._store.items_N, minlength=self._store.num_items)
            weights, numbers = np.unique(counts_N[counts_N > 0], return_counts=True)
            return weights / (weights * numbers).sum(), numbers.astype(float)
        edges = np.unique(np.geomspace(1, self.items + 1, _BINS).astype(np.int64))
        numbers = np.diff(edges).astype(float)
        middles = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, edges[:-1]).astype(float))
        weights = middles**-self.zipf
        return weights / (weights * numbers).sum(), numbers

    @property
    def rows(self) -> int:
        """Rows of the item table."""
        return self.items if self._store is None else self._store.num_items

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, as they are sent."""
        return 4 * self.model.dim

    @cached_property
    def cost(self) -> Cost:
        """FLOPs of a window as a function of its length, which batches are balanced by."""
        none, one, two = (
            training_flops(self.model, [length], negatives=self.negatives) for length in (0, 1, 2)
        )
        quadratic = (two - 2 * one + none) / 2
        return Cost(one - none - quadratic, quadratic, float(none))

    def draw_lengths(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the lengths of so many windows."""
        longest = self.model.max_len
        if self._store is not None:
            lengths = rng.choice(self._store.lengths_U, count)
        else:
            law = self.lengths
            drawn = law.median * np.exp(law.sigma * rng.standard_normal(count))
            lengths = np.clip(np.rint(drawn).astype(np.int64), law.shortest, law.longest)
        return np.minimum(lengths, longest).astype(np.int64)

    def draw_loads(self, workers: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        """Draw one global batch: each worker's FLOPs over the mean, and the mean FLOPs."""
        lengths = self.draw_lengths(self.samples * workers, rng)
        costs = self.cost(lengths)
        ranks = assign(lengths, workers, balance=self.balance, cost=self.cost)
        loads_W = np.bincount(ranks, weights=costs, minlength=workers)
        return loads_W / loads_W.mean(), float(loads_W.mean())

    @cached_property
    def _typical_lengths(self) -> np.ndarray:
        return self.draw_lengths(4096, np.random.default_rng(0))

    @cached_property
    def tokens(self) -> float:
        """Mean tokens of a worker's batch."""
        return self.samples * float(self._typical_lengths.mean())

    @cached_property
    def flops(self) -> float:
        """Mean training FLOPs of a worker's batch."""
        return self.samples * float(self.cost(self._typical_lengths).mean())

    def unique_keys(self, tokens: float) -> float:
        """Return the expected number of different items among so many drawn ones."""
        probabilities, numbers = self._popularity
        return float((numbers * -np.expm1(-tokens * probabilities)).sum())

    def unique_negatives(self, tokens: float, batches: float = 1.0) -> float:
        """Return the expected number of different negatives of so many tokens, drawn evenly."""
        drawn = self.negatives * (batches if self.shared_negatives else tokens)
        return float(self.rows * -np.expm1(-drawn / self.rows))

    def keys(self, batches: float = 1.0) -> float:
        """Return the different keys that so many workers' batches have together."""
        tokens = batches * self.tokens
        return self.unique_keys(tokens) + self.unique_negatives(tokens, batches)

    def overlap(self, batches: float) -> float:
        """Return the share of a step's keys that the step before has too, over a whole group."""
        one = self.keys(batches)
        return min(1.0, max(0.0, 2.0 - self.keys(2 * batches) / one))

    def inflation(self, micro_batches: int) -> float:
        """Return the keys sent for a batch cut into parts, over those of the whole batch.

        Real batches are clustered as training does; keys from a law have no clusters to find.
        """
        if micro_batches == 1:
            return 1.0
        if self._store is not None:
            return self._measured_inflation(micro_batches)
        whole, part = self.unique_keys(self.tokens), self.tokens / micro_batches
        negatives = self.unique_negatives(self.tokens)
        drawn = negatives if self.shared_negatives else self.unique_negatives(part)
        return (micro_batches * (self.unique_keys(part) + drawn)) / (whole + negatives)

    def _measured_inflation(self, micro_batches: int) -> float:
        assert self._store is not None
        store, rng = self._store, np.random.default_rng(0)
        found = []
        for _ in range(_BATCHES_CUT):
            users = rng.choice(store.num_users, min(self.samples, store.num_users), replace=False)
            windows = [
                store.items_N[max(begin, end - self.model.max_len) : end]
                for begin, end in zip(
                    store.offsets_U1[users], store.offsets_U1[users + 1], strict=True
                )
            ]
            keys_T = torch.from_numpy(np.concatenate(windows).astype(np.int64))
            lengths = torch.tensor([0, *(len(window) for window in windows)])
            offsets_B1 = lengths.cumsum(0)
            parts = cluster_samples(keys_T, offsets_B1, micro_batches)
            found.append(key_inflation(keys_T, offsets_B1, parts))
        return float(np.mean(found))
