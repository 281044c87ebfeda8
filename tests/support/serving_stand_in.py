"""A process with a stand-in for `Instance`: the real app, store and tickets, scores by hashing.

It runs without torch. Its scores depend on every behaviour and every candidate, so a router that
mixes users or loses behaviours is found out. Touch this when the service calls another method of
`Instance`.
"""

import asyncio
import hashlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.history.user_history import History
from slipstream.serving.engine.serving_rules import ServingRules
from slipstream.serving.http.instance_app import read_settings, serve_instance
from slipstream.serving.id_arrays import as_numbers, id_array
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError

NUM_ITEMS = 100_000
MAX_LEN = 64


def standin_scores(
    items: list[int], timestamps: list[int], candidates: list[int], version: str = "v1"
) -> list[float]:
    """Return the scores of the stand-in: what the tests expect."""
    history = hashlib.blake2b(repr((version, items, timestamps)).encode(), digest_size=16).digest()
    digests = [
        hashlib.blake2b(history + candidate.to_bytes(8, "big"), digest_size=6).digest()
        for candidate in candidates
    ]
    return [int.from_bytes(digest, "big") / 2**48 for digest in digests]


class StandInItems:
    """A catalogue whose items are 0 to NUM_ITEMS - 1, each its own row, called `item N`."""

    def find(self, items: Any) -> np.ndarray:
        numbers, valid = as_numbers(id_array(items))
        return np.where(valid & (numbers >= 0) & (numbers < NUM_ITEMS), numbers, -1)

    def contains(self, items: Any) -> np.ndarray:
        return self.find(items) >= 0

    def canonical(self, items: Any) -> np.ndarray:
        return as_numbers(id_array(items))[0]

    def originals(self, rows: np.ndarray) -> list[int]:
        return rows.tolist()

    def titles(self, items: Any) -> list[str | None]:
        return [f"item {item}" if item % 2 else None for item in items]

    def shown(self, names: list[str], items: Any) -> dict[str, list[Any]]:
        if set(names) - {"parity"}:
            raise BadRequest("no item feature of this bundle (known: parity)")
        return {"parity": [item % 2 for item in items]}


class StandInInstance:
    """Remembers what it pre-inferred and takes `rank_ms` for a ranking.

    Refuses users called `full…` and fails on those called `crash…`.
    """

    max_len = MAX_LEN
    tasks = ("score",)
    actions = ("click",)
    timed = True
    backlog = 0

    def __init__(
        self,
        bundle: Path,
        rank_ms: float = 0.0,
        repeat: str = "exclude",
        window: str = "stepped",
    ) -> None:
        self.version = (bundle / "version").read_text().strip()
        self.items, self.rules = StandInItems(), ServingRules(repeat == "exclude", window, MAX_LEN)
        self._rank_ms = rank_ms
        self._kept: set[tuple[str, int]] = set()
        self._running = 0
        self.request_times: list[int | None] = []
        self.closed = False

    async def preinfer(self, user: str, history: History, *, rank_in: float | None) -> Any:
        self._check(history)
        self._kept.add((user, len(history.items)))
        return SimpleNamespace(admitted=True, reason="", key=None, tokens=len(history.items))

    async def rank(
        self,
        user: str,
        history: History,
        candidates: list[int],
        *,
        recent: History | None,
        deadline: float,
        allow_truncate: bool,
        request_time: int | None = None,
    ) -> Any:
        assert not self.closed, "a closed instance was used"
        if user.startswith("full"):
            raise OverloadError("queue")
        if user.startswith("crash"):
            raise RuntimeError("secret detail")
        self._check(history)
        self.request_times.append(request_time)
        self._running += 1
        try:
            await asyncio.sleep(self._rank_ms / 1000)
        finally:
            self._running -= 1
        if time.monotonic() > deadline:
            raise DeadlineError("too late")
        whole = history if recent is None else history.then(recent)
        scores = standin_scores(
            whole.items.tolist(), whole.timestamps.tolist(), candidates, self.version
        )
        hit = "device" if (user, len(history.items)) in self._kept else "inline"
        return SimpleNamespace(
            scores={"score": np.array(scores)}, hit=hit, truncated=False, version=self.version
        )

    async def retrieve(
        self,
        history: History,
        k: int,
        *,
        deadline: float,
        request_time: int | None,
        exclude_seen: bool,
        exclude: np.ndarray,
    ) -> list[tuple[int, float]]:
        self._check(history)
        self.request_times.append(request_time)
        items = np.setdiff1d(np.arange(k + 10 + len(exclude)), exclude)[: k + 10].tolist()
        scores = standin_scores(
            history.items.tolist(), history.timestamps.tolist(), items, self.version
        )
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[:k]
        return [(items[place], scores[place]) for place in order]

    async def forget(self, user: str, deadline: float) -> None:
        self._kept = {kept for kept in self._kept if kept[0] != user}

    def stats(self) -> dict[str, float]:
        return {"running": float(self._running), "kept": float(len(self._kept))}

    async def drain(self, timeout: float) -> None:
        while self._running:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self.closed = True

    discard = close

    def _check(self, history: History) -> None:
        assert self.items.contains(history.items).all() and len(history.items) <= MAX_LEN


def main(argument: str) -> None:
    settings = read_settings(argument)

    def open_instance(_current: object) -> Any:
        return StandInInstance(Path(settings.bundle), **settings.model)

    serve_instance(settings, open_instance)


if __name__ == "__main__":
    main(sys.argv[1])
