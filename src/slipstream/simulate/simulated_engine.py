"""An engine that takes time and computes nothing, and memory that has sizes and no bytes.

Serving's own classes run over it: windows, keys, tiers, chunks and batches are theirs. What a pass
takes comes from a cost model (`serving/instance/cost_model.py`), times how slow this machine is
now and a random factor. Touch this when the engine gets another kind of work.
"""

import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from slipstream.models.model_config import ModelConfig
from slipstream.serving.cache.arena import Arena, Extents
from slipstream.serving.cache.prefix_memory import PrefixMemory
from slipstream.serving.cache.shelf import Record, Shelf
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import CHUNK_TOKENS, Engine
from slipstream.serving.engine.prefix import MIN_ROWS, KVShape, Prefix, PrefixBuffer
from slipstream.serving.engine.rank_query import RankQuery
from slipstream.serving.engine.serving_rules import ServingRules
from slipstream.serving.instance.cost_model import CostModel


class EngineSpec(BaseModel):
    """A served model and what its passes take on one instance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelConfig = Field(
        default_factory=lambda: ModelConfig.model_validate(
            {"kind": "hstu", "dim": 64, "blocks": 2, "heads": 2, "max_len": 6144}
        )
    )
    tokens_per_behaviour: int = Field(default=2, ge=1, le=2)
    user_tokens: int = Field(default=0, ge=0)
    window: str = "latest"
    # Seconds of a call, a token, a pair of tokens and a cached token (cost_model.py).
    coefficients: tuple[float, float, float, float] = (1.2e-3, 7.5e-6, 2.6e-9, 2e-7)
    fill_coefficients: tuple[float, float, float, float] | None = None
    inline_coefficients: tuple[float, float, float, float] | None = None
    copy_seconds_per_byte: float = Field(default=2e-10, ge=0)
    jitter: float = Field(default=0.05, ge=0, lt=2, description="spread of a pass, lognormal")

    def cost_model(self) -> CostModel:
        """Return what an instance measures at its start."""
        return CostModel(
            self.coefficients,
            self.copy_seconds_per_byte,
            self.fill_coefficients,
            inline_coefficients=self.inline_coefficients,
        )

    @classmethod
    def measured(
        cls, model: ModelConfig, measured: Mapping[str, Any], **other: Any
    ) -> "EngineSpec":
        """Return a spec from what `CostModel.measured` returned."""
        return cls.model_validate({"model": model, **measured, **other})


class SimulatedHistory(EncodedHistory):
    """Behaviours `begin` to `end` of a user's history, without their content."""

    user: int
    begin: int
    end: int

    def __init__(self, user: int, begin: int, end: int) -> None:
        own = self.__dict__  # the class it extends is frozen
        own["user"], own["begin"], own["end"] = user, begin, end

    def __len__(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int | None = None) -> "SimulatedHistory":
        """Return behaviours `begin` to `end`, counted from the first one here."""
        stop = self.end if end is None else min(self.end, self.begin + end)
        return SimulatedHistory(self.user, min(self.begin + begin, stop), stop)

    def then(self, later: EncodedHistory) -> "SimulatedHistory":
        """Return these behaviours followed by later ones."""
        return SimulatedHistory(self.user, self.begin, self.end + len(later))

    def digest(self, count: int | None = None) -> bytes:
        """Return 16 bytes for the first `count` behaviours."""
        end = self.end if count is None else self.begin + count
        return (self.user << 64 | self.begin << 32 | end).to_bytes(16, "little")


class UnbackedBuffer(PrefixBuffer):
    """A buffer of a size without memory."""

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape, self.capacity, self.nbytes = shape, capacity, shape.nbytes(capacity)

    def copy_layer(self, source: PrefixBuffer, tokens: int, layer: int) -> None:
        """Take the time of the copy."""
        shape = self.shape
        assert isinstance(shape, UnbackedShape)
        shape.pay_copy(shape.nbytes(tokens) / shape.layers)


def _pay_nothing(nbytes: float) -> None:
    pass


@dataclass(frozen=True)
class UnbackedShape(KVShape):
    """Sizes of keys and values whose buffers have no memory; `pay_copy` takes copied bytes."""

    pay_copy: Callable[[float], None] = field(default=_pay_nothing, compare=False, repr=False)
    _sizes: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def nbytes(self, capacity: int) -> int:
        """Return the bytes of a buffer, computed once for each capacity."""
        found = self._sizes.get(capacity)
        if found is None:
            found = self._sizes[capacity] = super().nbytes(capacity)
        return found

    def buffer(self, capacity: int, memory: Any = None) -> PrefixBuffer:
        """Return a buffer for `capacity` tokens."""
        return UnbackedBuffer(self, capacity)


class UnbackedArena(Arena):
    """An arena of a size without memory."""

    def __init__(self, nbytes: int) -> None:
        Extents.__init__(self, nbytes)

    def view(self, offset: int, nbytes: int) -> Any:
        """Return no bytes."""
        return None

    def take(self, nbytes: int) -> int | None:
        """Take a piece; there are no pages to fetch."""
        return Extents.take(self, nbytes)


class UnbackedShelf(Shelf):
    """A shelf of a size without memory; like a real one it outlives a restarted instance."""

    def __init__(self, nbytes: int, max_records: int = 4096) -> None:
        self.limit, self.extents = Extents(nbytes).nbytes, Extents(nbytes)
        self.max_records, self._free_places = max_records, list(range(max_records - 1, -1, -1))
        self.records: OrderedDict[tuple[bytes, int, bytes], Record] = OrderedDict()
        self.dropped = self._order = 0

    def _grow(self, nbytes: int) -> bool:
        return False

    def payload(self, offset: int, nbytes: int) -> Any:
        """Return no bytes."""
        return None

    def checksum(self, offset: int, nbytes: int) -> int:
        """Return 0."""
        return 0

    def remove(self, record: Record) -> None:
        """Forget a record and free its bytes."""
        del self.records[record.user, record.behaviours, record.digest]
        self._free_places.append(record.place)
        self.extents.give(record.offset, record.nbytes)

    def close(self) -> None:
        """Keep everything for the next process."""

    def _write(self, r: Record) -> None:
        pass


@dataclass
class UnbackedMemory(PrefixMemory):
    """Both tiers without memory; the shelf stays when an instance restarts."""

    shelf: UnbackedShelf | None = None

    def arena(self, nbytes: int) -> Arena:
        """Return an arena without memory."""
        return UnbackedArena(nbytes)

    def open_shelf(self, path: str | os.PathLike[str], nbytes: int, identity: bytes) -> Shelf:
        """Return the shelf of the process before, or a new one."""
        if self.shelf is None:
            self.shelf = UnbackedShelf(nbytes)
        return self.shelf


class _Catalogue:
    """Stands for the item ids: candidates are counted, not looked up."""

    def rows(self, candidates: Any) -> torch.Tensor:
        """Return as many rows as there are candidates."""
        return _some_rows(len(candidates))


@lru_cache(maxsize=64)
def _some_rows(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


class SimulatedEngine(Engine):
    """The engine's sizes and steps; every step adds its seconds to `owed`."""

    def __init__(self, spec: EngineSpec, seed: int) -> None:
        self.spec, self.version, self.task, self.tasks = spec, "simulated", "ranking", ("score",)
        self.config, self.max_len = spec.model, spec.model.max_len
        self.rules = ServingRules(False, spec.window, self.max_len)
        self.items, self.search = _Catalogue(), None  # type: ignore[assignment]
        model = spec.model
        self.shape = UnbackedShape(
            model.blocks, model.heads, model.dqk, model.dv, pay_copy=self._pay_copy
        )
        self.tokens_per_behaviour, self.user_tokens = spec.tokens_per_behaviour, spec.user_tokens
        held = 1 if model.time_bias == "next" else 0
        self.hold = max(held, -(-MIN_ROWS // self.tokens_per_behaviour))
        self.slowness, self.owed = 1.0, 0.0
        self._random = random.Random(seed)

    def encode(self, history: Any) -> EncodedHistory:
        """Return a simulated history as it is; None is an empty one."""
        return SimulatedHistory(0, 0, 0) if history is None else history

    def query_of_rows(
        self,
        prefix: Prefix | None,
        recent: Any,
        rows_C: torch.Tensor,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
    ) -> RankQuery:
        """Return a request as the scheduler's estimates read it."""
        new = self.encode(recent)
        if prefix is not None:
            new = prefix.held.then(new)
            prefix = prefix if prefix.tokens else None
        return RankQuery(prefix, new, rows_C, 0)

    def prefill_steps(
        self,
        encoded: EncodedHistory,
        buffer: PrefixBuffer,
        past: Prefix | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Iterator[int]:
        """Take the time of a prefill, one chunk through one layer at a time."""
        at, end, layers = 0, self.cached_behaviours(len(encoded)), self.shape.layers
        if past is not None:
            at = past.cached_behaviours
            at = min(at, max(0, end - self.hold)) if at < end else at
            for layer in range(layers if at else 0):
                buffer.copy_layer(past.buffer, self.tokens_of(at), layer)
                yield 0
        chunk = max(self.hold, chunk_tokens // self.tokens_per_behaviour)
        fill = self.spec.fill_coefficients or self.spec.coefficients
        while at < end:
            stop = end if end - at < chunk + self.hold else at + chunk
            new, cached = self.tokens_of(stop) - self.tokens_of(at), self.tokens_of(at)
            seconds = self._seconds(fill, new, cached) / layers
            for _ in range(layers):
                self._pay(seconds)
                yield self.tokens_of(stop)
            at = stop

    def rank_batch(self, queries: Sequence[RankQuery]) -> list[dict[str, np.ndarray]]:
        """Return no scores; `batch_seconds` told before what the pass takes."""
        return [{} for _ in queries]

    def batch_seconds(self, queries: Sequence[RankQuery]) -> float:
        """Return the seconds that ranking these requests together takes now."""
        total, copied = 0.0, 0
        for query in queries:
            past = 0 if query.past is None else query.past.tokens
            new = self.tokens_per_behaviour * len(query.new) + query.candidates_C.numel()
            inline = None if past else self.spec.inline_coefficients
            total += self._seconds(inline or self.spec.coefficients, new, past)
            copied += self.shape.nbytes(past) if past else 0
        if len(queries) > 1:
            total -= (len(queries) - 1) * self.spec.coefficients[0]
            total += 3 * copied * self.spec.copy_seconds_per_byte
        return total * self._factor()

    def _seconds(self, of: Sequence[float], new: int, past: int) -> float:
        a, b, c, d = of
        return a + b * new + c * new * (past + new / 2) + d * past

    def _pay_copy(self, nbytes: float) -> None:
        self._pay(nbytes * self.spec.copy_seconds_per_byte)

    def _pay(self, seconds: float) -> None:
        self.owed += seconds * self._factor()

    def _factor(self) -> float:
        jitter = self.spec.jitter
        return self.slowness * (math.exp(jitter * self._random.gauss(0, 1)) if jitter else 1.0)
