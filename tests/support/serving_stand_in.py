"""A process with a stand-in for `Instance`: the real app, store and tickets, scores by hashing.

It runs without torch. Its scores depend on every behaviour and every candidate, so a router that
mixes users or loses behaviours is found out. Touch this when the service calls another method of
`Instance`.
"""

import asyncio
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.serving.engine.serving_rules import ServingRules
from slipstream.serving.http.instance_app import InstanceSettings, serve_instance
from slipstream.serving.http.process import read_settings
from slipstream.serving.id_arrays import as_numbers, id_array
from slipstream.serving.instance.recommend_query import RecommendQuery, RecommendResult
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


def write_standin_bundle(bundle: Path, version: str) -> None:
    """Put a version in place of the one before, as an export does: never into its files."""
    beside = bundle.with_name(f"{bundle.name}-{version}-new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    (beside / "bundle.json").write_text(json.dumps({"version": version}))
    old = bundle.with_name(f"{bundle.name}-{version}-old")
    if bundle.exists():
        bundle.rename(old)
    beside.rename(bundle)
    shutil.rmtree(old, ignore_errors=True)


def read_standin_version(bundle: Path) -> str:
    """The version of a stand-in's bundle."""
    return str(json.loads((bundle / "bundle.json").read_text())["version"])


class StandInItems:
    """A catalogue whose items are 0 to NUM_ITEMS - 1, each its own row, called `item N`."""

    def find(self, items: Any) -> np.ndarray:
        numbers, valid = as_numbers(id_array(items))
        return np.where(valid & (numbers >= 0) & (numbers < NUM_ITEMS), numbers, -1)

    def has_seen(self, _history: Any) -> bool:
        return False

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

    Refuses users called `full…`, fails on those called `crash…`, and moves no more after `stuck…`.
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
        self.version = read_standin_version(bundle)
        if self.version.startswith("bad"):
            raise SlipstreamError(f"version {self.version} ranks wrongly; it is not served")
        self.items, self.rules = StandInItems(), ServingRules(repeat == "exclude", window, MAX_LEN)
        self._rank_ms = rank_ms
        self._kept: set[tuple[str, int]] = set()
        self.cascade = StandInCascade(self)
        self._running = 0
        self.request_times: list[int | None] = []
        self.contexts: list[Mapping[str, str | None]] = []
        self.labels: Mapping[str, Any] = {}  # of the last history ranked after
        self.closed = self.stuck = False

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
        context: Mapping[str, str | None],
        rows: np.ndarray | None = None,
    ) -> Any:
        assert rows is None or rows.tolist() == self.items.find(candidates).tolist()
        assert not self.closed, "a closed instance was used"
        if user.startswith("full"):
            raise OverloadError("queue")
        self.stuck |= user.startswith("stuck")
        if user.startswith("crash"):
            raise RuntimeError("secret detail")
        self._check(history)
        self.request_times.append(request_time)
        self.contexts.append(context)
        self.labels = {name: each.tolist() for name, each in history.context.items()}
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
            scores={"score": np.array(scores)},
            hit=hit,
            truncated=False,
            version=self.version,
            kept=True,
        )

    async def forget(self, user: str, deadline: float) -> None:
        self._kept = {kept for kept in self._kept if kept[0] != user}

    def is_alive(self) -> bool:
        return not self.stuck

    def stats(self) -> dict[str, float]:
        return {"running": float(self._running), "kept": float(len(self._kept))}

    async def keep_prefixes(self, seconds: float) -> None:
        """Keep nothing."""

    async def drain(self, timeout: float) -> None:
        while self._running:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self.closed = True

    discard = close

    def _check(self, history: History) -> None:
        assert self.items.contains(history.items).all() and len(history.items) <= MAX_LEN


class StandInCascade:
    """The stages of the stand-in: it retrieves the first items that the rules leave."""

    answers_anybody = False
    from_behaviours = 2  # shorter histories need not be announced

    def __init__(self, instance: StandInInstance) -> None:
        self._instance = instance
        self.queries: list[RecommendQuery] = []

    async def preinfer(self, user: str, history: History, rank_in: float | None) -> Any:
        return await self._instance.preinfer(user, self._known(history), rank_in=rank_in)

    async def recommend(
        self, user: str, history: History, query: RecommendQuery
    ) -> RecommendResult:
        if query.by not in (None, "score"):
            raise BadRequest("'purchase' is no task of this model")
        self.queries.append(query)
        known, items = self._known(history), self._instance.items
        excluded = items.find(query.rules.exclude)
        given = query.candidates
        sent = np.arange(query.retrieve + len(excluded)) if given is None else items.find(given)
        rows = sent[(sent >= 0) & ~np.isin(sent, excluded)][: query.retrieve]
        await self.preinfer(user, history, None)
        result = await self._instance.rank(
            user,
            known,
            rows.tolist(),
            recent=None,
            deadline=query.deadline,
            allow_truncate=query.allow_truncate,
            request_time=query.request_time,
            context=query.context,
        )
        scores = result.scores["score"]
        best = np.argsort(-scores, kind="stable")[: query.count]
        return RecommendResult(
            rows[best].tolist(),
            {"score": scores[best].tolist()},
            result.hit,
            unknown=[] if given is None else [given[at] for at in np.flatnonzero(sent < 0)],
            skipped=self._skipped,
        )

    def _known(self, history: History) -> History:
        first = self._instance.rules.window_start(history.total, history.first)
        window = history.part(min(first, history.total), history.total)
        known = window.where(self._instance.items.contains(window.items))
        self._skipped = len(window) - len(known)
        return known


def main(argument: str) -> None:
    settings = read_settings(argument, InstanceSettings)

    def open_instance(directory: Path, _current: object) -> Any:
        return StandInInstance(directory, **settings.model)

    serve_instance(settings, open_instance)


if __name__ == "__main__":
    main(sys.argv[1])
