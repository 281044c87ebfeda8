"""A stand-in instance: the real app, store and tickets around a model that scores by hashing. A
process of its own, without torch.

Its scores depend on every behaviour and every candidate, so a router that mixes users or loses
behaviours is found out.
"""

import asyncio
import hashlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.serving.http.instance_app import read_settings, serve_model
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError

NUM_ITEMS = 100_000
MAX_LEN = 64


def standin_behaviours(
    items: np.ndarray, timestamps: np.ndarray, actions: dict[str, np.ndarray], features: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        items=list(map(int, items)),
        timestamps=list(map(int, timestamps)),
        actions=actions,
        features=features,
    )


def standin_known(_model: object, items: np.ndarray) -> np.ndarray:
    return items < NUM_ITEMS


def standin_scores(
    items: list[int], timestamps: list[int], candidates: list[int], version: str = "v1"
) -> list[float]:
    """What the stand-in answers: the oracle of the tests."""
    history = hashlib.blake2b(repr((version, items, timestamps)).encode(), digest_size=16).digest()
    digests = [
        hashlib.blake2b(history + candidate.to_bytes(8, "big"), digest_size=6).digest()
        for candidate in candidates
    ]
    return [int.from_bytes(digest, "big") / 2**48 for digest in digests]


class StandInModel:
    """Pre-infers by remembering; takes `rank_ms` for a ranking; refuses users called `full…` and
    fails on those called `crash…`.
    """

    max_len = MAX_LEN
    tasks = ("score",)
    backlog = 0

    def __init__(self, bundle: Path, rank_ms: float = 0.0) -> None:
        self.version = (bundle / "version").read_text().strip()
        self._rank_ms = rank_ms
        self._kept: set[tuple[str, int]] = set()
        self._running = 0
        self.closed = False

    async def preinfer(self, user: str, history: Any, *, rank_in: float | None) -> Any:
        self._check(history)
        self._kept.add((user, len(history.items)))
        return SimpleNamespace(admitted=True, reason="", key=None, tokens=len(history.items))

    async def rank(
        self,
        user: str,
        history: Any,
        candidates: list[int],
        *,
        recent: Any,
        deadline: float,
        allow_truncate: bool,
    ) -> Any:
        assert not self.closed, "a closed model was asked"
        if user.startswith("full"):
            raise OverloadError("queue")
        if user.startswith("crash"):
            raise RuntimeError("secret detail")
        self._check(history)
        if max(candidates) >= NUM_ITEMS:
            raise BadRequest("an item is not in this catalogue")
        self._running += 1
        try:
            await asyncio.sleep(self._rank_ms / 1000)
        finally:
            self._running -= 1
        if time.monotonic() > deadline:
            raise DeadlineError("too late")
        items = history.items + (recent.items if recent is not None else [])
        timestamps = history.timestamps + (recent.timestamps if recent is not None else [])
        scores = {"score": standin_scores(items, timestamps, candidates, self.version)}
        hit = "device" if (user, len(history.items)) in self._kept else "inline"
        return SimpleNamespace(scores=scores, hit=hit, truncated=False, version=self.version)

    async def retrieve(self, history: Any, k: int, *, deadline: float) -> list[tuple[int, float]]:
        self._check(history)
        scores = standin_scores(
            history.items, history.timestamps, list(range(k + 10)), self.version
        )
        order = sorted(range(len(scores)), key=lambda item: -scores[item])[:k]
        return [(item, scores[item]) for item in order]

    def stats(self) -> dict[str, float]:
        return {"running": float(self._running), "kept": float(len(self._kept))}

    async def drain(self, timeout: float) -> None:
        while self._running:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self.closed = True

    discard = close

    def _check(self, history: Any) -> None:
        if any(item >= NUM_ITEMS for item in history.items):
            raise BadRequest("an item is not in this catalogue")
        if len(history.items) > MAX_LEN:
            raise BadRequest("the history is too long")


def main(argument: str) -> None:
    settings = read_settings(argument)
    serve_model(
        settings,
        lambda _current: StandInModel(Path(settings.bundle), **settings.model),
        ("click",),
        standin_behaviours,
        standin_known,
    )


if __name__ == "__main__":
    main(sys.argv[1])
