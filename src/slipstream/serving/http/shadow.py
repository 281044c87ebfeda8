"""Shadow scoring: the candidate scores what the stable version has answered, to be compared.

Nobody waits for it and nobody sees its scores; only the differences are counted. It is bounded: a
ranking that would be one too many is skipped and counted. Touch this when something else of two
versions should be compared.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.serving.http.instance_lifecycle import InstanceLifecycle
from slipstream.serving.http.request_history import drop_unknown

MAX_AT_ONCE = 4
SECONDS = 2.0  # for one ranking
EQUAL = 1e-6  # scores that differ by less are the same
log = logging.getLogger("slipstream.serving")


class ShadowScoring:
    """Compares the candidate with what was answered; its counts are shown in the metrics."""

    def __init__(self, life: InstanceLifecycle) -> None:
        self._life = life
        self._running: set[asyncio.Task[None]] = set()
        names = ("compared", "differed", "top_changed", "skipped", "failed")
        self.counts: Counter[str] = Counter({f"shadow_{name}": 0 for name in names})
        self.difference = 0.0  # sum of the largest difference of each ranking

    def stats(self) -> dict[str, float]:
        """Return the counters."""
        counts = {name: float(count) for name, count in self.counts.items()}
        return counts | {"shadow_difference_sum": self.difference}

    def wants(self, user: str, version: str) -> bool:
        """Return whether the candidate scores what `version` has answered this user."""
        record = self._life.record
        return version == record.stable and record.shadows(user)

    def offer(
        self,
        user: str,
        history: History,
        items: Sequence[Any],
        scores: Mapping[str, Sequence[float]],
        **asked: Any,
    ) -> None:
        """Let the candidate score a ranking that it `wants`, unless too many are under way.

        `asked` are the time and the context of the request.
        """
        if len(self._running) >= MAX_AT_ONCE:
            self.counts["shadow_skipped"] += 1
            return
        task = asyncio.create_task(
            self._compare(str(self._life.record.candidate), user, history, items, scores, asked)
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _compare(
        self,
        version: str,
        user: str,
        history: History,
        items: Sequence[Any],
        scores: Mapping[str, Sequence[float]],
        asked: Mapping[str, Any],
    ) -> None:
        try:
            async with self._life.use(version=version) as instance:
                if instance.version != version:
                    return  # it was dropped meanwhile
                known = np.flatnonzero(instance.items.contains(items)).tolist()
                result = await instance.rank(
                    user,
                    drop_unknown(instance, history),
                    [items[place] for place in known],
                    recent=None,
                    deadline=time.monotonic() + SECONDS,
                    allow_truncate=True,
                    **asked,
                )
        except (SlipstreamError, TimeoutError) as error:
            self.counts["shadow_failed"] += 1
            log.debug("shadow scoring failed: %s", error)
            return
        self._count(known, scores, result.scores)

    def _count(
        self, known: list[int], answered: Mapping[str, Sequence[float]], found: Mapping[str, Any]
    ) -> None:
        """Count how the scores of one ranking differ; tasks that one of them lacks are left out."""
        self.counts["shadow_compared"] += 1
        largest, top = 0.0, False
        for task in answered.keys() & found.keys():
            mine, other = np.asarray(answered[task])[known], np.asarray(found[task])
            if len(other):
                largest = max(largest, float(np.abs(mine - other).max()))
                top |= int(mine.argmax()) != int(other.argmax())
        self.counts["shadow_differed"] += largest > EQUAL
        self.counts["shadow_top_changed"] += top
        self.difference += largest

    async def close(self) -> None:
        """End what is running."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
