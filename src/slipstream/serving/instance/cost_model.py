"""What a pass costs on this machine: measured when an instance starts, corrected by every pass.

    seconds(t new tokens behind p cached ones) = a + b·t + c·t·(p + t/2) + d·p

a: the call itself; b: projections; c: attention; d: reading the cached keys and values. Passes of a
prefill, whose last layer attends to nothing, have coefficients of their own, and so have whole
passes in line, in whose last layer only the candidates attend. All are non-negative, so more work
is never predicted to take less time. Online, a factor follows the ratio of seen to
predicted time (a busier machine, a slower clock, colder caches), and a second one its upper end,
for predictions of the tail. Ranking behind a prefix, whole passes in line and prefills in chunks
meet different conditions, so each has factors of its own. What was learnt fades within seconds
where nothing confirms it: otherwise an instance that predicts to be too slow for everything would
never run what could correct it. Touch this when another kind of work needs a prediction.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import CHUNK_TOKENS, Engine
from slipstream.serving.engine.prefix import PrefixBuffer
from slipstream.serving.engine.rank_query import RankQuery

_LEARNING = 0.05  # share of the newest ratio in the running mean
_TAIL = 0.99
_MOST = 4.0  # a pass that takes longer than this many times the expected was interrupted
_FADE_SECONDS = 5.0
_FIRST_TAIL = 1.5
CHUNKS = (2048, 1024, 512, 256)  # smaller ones would pay more for their calls than for their tokens
_MEASURED = ("coefficients", "fill_coefficients", "inline_coefficients")
_INLINE_TOKENS = (16, 256, 1024, 2048)  # of the histories that are ranked in line to measure
_CANDIDATES = 100  # of these rankings
KINDS = ("rank", "inline", "prefill")


Sample = tuple[int, int, float]  # new tokens, past tokens, seconds


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _features(new: float, past: float) -> np.ndarray:
    return np.array([1.0, new, new * (past + new / 2), past])


def _predicted(coefficients: Sequence[float], new: float, past: float) -> float:
    """Return coefficients x features; plain numbers, because a request asks many times."""
    a, b, c, d = coefficients
    return a + b * new + c * new * (past + new / 2) + d * past


def non_negative_fit(x_MF: np.ndarray, y_M: np.ndarray) -> np.ndarray:
    """Fit by least squares of relative errors; drop the most negative coefficient and fit again."""
    weighted, ones = x_MF / y_M[:, None], np.ones(len(y_M))
    scale = np.maximum(weighted.max(axis=0), 1e-300)
    active = list(range(x_MF.shape[1]))
    while active:
        found, *_ = np.linalg.lstsq(weighted[:, active] / scale[active], ones, rcond=None)
        if found.min() >= 0:
            break
        active.pop(int(found.argmin()))
    coefficients = np.zeros(x_MF.shape[1])
    if active:
        coefficients[active] = found / scale[active]
    return coefficients


def _fitted(samples: Sequence[Sample]) -> tuple[float, ...]:
    x_MF = np.array([_features(t, p) for t, p, _ in samples])
    found = non_negative_fit(x_MF, np.maximum([seconds for *_, seconds in samples], 1e-9))
    return _numbers(found.tolist())


@dataclass
class CostModel:
    """Predicted seconds of passes, copies and whole prefills."""

    coefficients: Sequence[float]  # of _features
    copy_seconds_per_byte: float
    fill_coefficients: Sequence[float] | None = None  # the same for passes of a prefill
    layers: int = 1
    slice_seconds: float = 0.008  # longest step of a prefill
    inline_coefficients: Sequence[float] | None = None  # the same for whole passes in line
    samples: Sequence[Sample] = ()  # what it was fitted to
    clock: Clock = SYSTEM_CLOCK
    # Seen / predicted: the running mean, and the 99th percentile.
    _factors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    _tails: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, _FIRST_TAIL))
    _seen_at: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, -math.inf))

    def __post_init__(self) -> None:
        self.coefficients = _numbers(self.coefficients)
        if self.fill_coefficients is not None:
            self.fill_coefficients = _numbers(self.fill_coefficients)
        if self.inline_coefficients is not None:
            self.inline_coefficients = _numbers(self.inline_coefficients)

    @classmethod
    def measure(
        cls, engine: Engine, *, seconds: float = 1.5, clock: Clock = SYSTEM_CLOCK
    ) -> "CostModel":
        """Run passes of several sizes for about `seconds` and fit them."""
        most = (
            engine.tokens_of(engine.max_len)
            // engine.tokens_per_behaviour
            * engine.tokens_per_behaviour
        )
        shapes = [
            (16, 0),
            (64, 64),
            (128, 1024),
            (CHUNK_TOKENS, 0),
            (CHUNK_TOKENS, 1536),
            (64, 3072),
            (16, 512),
        ]
        shapes = sorted({(min(t, most), min(p, max(0, most - t))) for t, p in shapes})
        run = _Passes(engine, max(t + p for t, p in shapes))
        works: dict[tuple[str, int, int], Callable[[], Any]] = {
            (kind, *shape): functools.partial(run, *shape, fill=kind == "prefill")
            for kind in ("rank", "prefill")
            for shape in shapes
        }
        for tokens in sorted({min(tokens, most) for tokens in _INLINE_TOKENS}):
            query = run.inline_query(tokens)
            new = tokens + query.candidates_C.numel()
            works["inline", new, 0] = functools.partial(engine.rank_batch, [query])
        fast = _timed(works, seconds, clock)
        samples, fills, inline = (
            [(new, past, taken) for (of, new, past), taken in fast.items() if of == kind]
            for kind in ("rank", "prefill", "inline")
        )
        start = clock.now()
        copied = run.copy()
        return cls.fit(samples, (clock.now() - start) / copied, fills, inline)

    @classmethod
    def fit(
        cls,
        samples: Sequence[Sample],
        copy_seconds_per_byte: float,
        fills: Sequence[Sample] = (),
        inline: Sequence[Sample] = (),
    ) -> "CostModel":
        """Fit the times of passes; without `fills` or `inline`, those count as any other."""
        return cls(
            _fitted(samples),
            copy_seconds_per_byte,
            _fitted(fills) if fills else None,
            samples=samples,
            inline_coefficients=_fitted(inline) if inline else None,
        )

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> "CostModel":
        """Return a model of what `measured` returned earlier, nothing learnt since."""
        coefficients, fill, inline = (measured[name] for name in _MEASURED)
        copy_seconds = measured["copy_seconds_per_byte"]
        return cls(coefficients, copy_seconds, fill, inline_coefficients=inline)

    def measured(self) -> dict[str, Any]:
        """Return what was measured as JSON values, for `of`."""
        sets = (self.coefficients, self.fill_coefficients, self.inline_coefficients)
        values = (None if each is None else list(each) for each in sets)
        return {
            **dict(zip(_MEASURED, values, strict=True)),
            "copy_seconds_per_byte": self.copy_seconds_per_byte,
        }

    def pass_seconds(self, new: int, past: int) -> float:
        """Predict one pass of `new` tokens behind `past` cached ones (0: in line)."""
        return self.factor("rank" if past else "inline") * self.plain_seconds(new, past)

    def prefill_seconds(self, tokens: int, past: int = 0) -> float:
        """Predict a prefill up to `tokens`, of which `past` are there already, in chunks."""
        total, at, chunk = 0.0, past, self.chunk_for(tokens)
        fill = self.coefficients if self.fill_coefficients is None else self.fill_coefficients
        while at < tokens:
            step = min(chunk, tokens - at)
            total += _predicted(fill, step, at)
            at += step
        return self.factor("prefill") * total

    def chunk_for(self, tokens: int) -> int:
        """Return the largest chunk whose step, half-way through a prefill, stays within a slice."""
        for chunk in CHUNKS:
            step = min(chunk, tokens)
            seconds = _predicted(self.coefficients, step, (tokens - step) / 2)
            if seconds / self.layers <= self.slice_seconds:
                return chunk
        return CHUNKS[-1]

    def copy_seconds(self, nbytes: int) -> float:
        """Predict the copy of so many bytes from one tier to the other."""
        return nbytes * self.copy_seconds_per_byte

    def factor(self, kind: str) -> float:
        """Return seen / predicted in the last seconds; 1 where nothing was seen."""
        learnt = self._factors[kind]
        return learnt if learnt == 1.0 else 1.0 + self._trust(kind) * (learnt - 1.0)

    def tail_seconds(self, seconds: float, kind: str = "rank") -> float:
        """Return the 99th percentile of work whose typical time is `seconds`."""
        tail = _FIRST_TAIL + self._trust(kind) * (self._tails[kind] - _FIRST_TAIL)
        return seconds * max(1.0, tail / self.factor(kind))

    def observe(self, kind: str, predicted: float, seen: float) -> None:
        """Learn from work that took `seen` seconds where `predicted` (factor included) were."""
        if predicted <= 0 or seen <= 0:
            return
        factor = self.factor(kind)
        ratio = min(_MOST, max(1 / _MOST, seen / predicted * factor))
        self._factors[kind] = factor + _LEARNING * (ratio - factor)
        # A quantile by stochastic approximation: a step up for what lies above, a small one down
        # for what lies below.
        tail = _FIRST_TAIL + self._trust(kind) * (self._tails[kind] - _FIRST_TAIL)
        step = _LEARNING * tail
        self._tails[kind] = max(
            1 / _MOST, tail + (step * _TAIL if ratio > tail else -step * (1 - _TAIL))
        )
        self._seen_at[kind] = self.clock.now()

    def _trust(self, kind: str) -> float:
        """Return how much of what was learnt still counts."""
        since = self.clock.now() - self._seen_at[kind]
        return math.exp(-since / _FADE_SECONDS) if since > 0.0 else 1.0

    def plain_seconds(self, new: int, past: int) -> float:
        """Predict a pass as measured at the start, without factors."""
        inline = None if past else self.inline_coefficients
        return _predicted(self.coefficients if inline is None else inline, new, past)


def _timed(
    works: Mapping[tuple[str, int, int], Callable[[], Any]], seconds: float, clock: Clock
) -> dict[tuple[str, int, int], float]:
    """Return the seconds of each work, all in turns for about `seconds`: a fast quarter of them.

    Others use the machine while it starts; what they slow down is not what a pass costs.
    """
    for work in works.values():
        work()  # warm-up, not counted
    found: dict[tuple[str, int, int], list[float]] = {name: [] for name in works}
    begin = clock.now()
    while clock.now() - begin < seconds or not all(found.values()):
        for name, work in works.items():
            start = clock.now()
            work()
            found[name].append(clock.now() - start)
    return {name: float(np.quantile(times, 0.25)) for name, times in found.items()}


class _Passes:
    """Random passes of a given size over one buffer."""

    def __init__(self, engine: Engine, capacity: int) -> None:
        self.engine = engine
        self.buffer = PrefixBuffer(engine.shape, capacity)
        shape = engine.shape
        for layer in range(shape.layers):
            rows = (
                0.1 * torch.randn(capacity, shape.heads, width) for width in (shape.dqk, shape.dv)
            )
            self.buffer.write(layer, 0, *rows)
        self.buffer.times_S.zero_()
        rows_T = torch.randint(
            0, len(engine.items), (capacity,), generator=torch.Generator().manual_seed(0)
        )
        labels_TA = torch.zeros(capacity, len(engine.tasks) if engine.task == "ranking" else 0)
        user = dict.fromkeys(engine.encoder.features, 0)
        context = {name: torch.zeros_like(rows_T) for name in engine.encoder.context}
        self.history = EncodedHistory(rows_T, torch.arange(capacity), labels_TA, user, context)

    def __call__(self, new: int, past: int, *, fill: bool) -> None:
        history = self.history.part(0, max(1, new // self.engine.tokens_per_behaviour))
        self.engine.run_pass(history, self.buffer, past, fill=fill)

    def inline_query(self, tokens: int) -> RankQuery:
        """Return a ranking of so many tokens of history without a prefix."""
        history = self.history.part(0, max(1, tokens // self.engine.tokens_per_behaviour))
        query = self.engine.make_query(None, history, [])
        return replace(query, candidates_C=torch.arange(min(_CANDIDATES, len(self.engine.items))))

    def copy(self) -> int:
        """Copy the buffer twice and return the bytes copied."""
        other = PrefixBuffer(self.buffer.shape, self.buffer.capacity)
        other.copy_tokens(self.buffer, self.buffer.capacity)  # touches the pages
        other.copy_tokens(self.buffer, self.buffer.capacity)
        return 2 * self.buffer.nbytes
