"""A user whose stored history grows while the user is ranked.

An answer says how many behaviours it saw: its scores must be those of so many, and no behaviour
whose append was acknowledged before the request may be missing. Touch this when behaviours arrive
in another way.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.chaos.load import Load, Visitor
from slipstream.serving.http.client import AsyncClient
from slipstream.serving.http.messages import HistoryMessage, RankAnswer

STEP = 3  # behaviours of an append
PAUSE_SECONDS = 0.1
CONFLICT = 409


class GrowingUser:
    """Two sessions about one user; when the history is at its end, another user begins it."""

    def __init__(self, stages: Mapping[int, Visitor], load: Load) -> None:
        """`stages` is what is expected by how many behaviours are stored, each STEP more."""
        self._stages, self._load = stages, load
        self._whole = stages[max(stages)].history
        self._names = (f"growing {number}" for number in itertools.count())
        self._user, self._stored = next(self._names), 0

    async def run(self, client: AsyncClient, stopping: Callable[[], bool]) -> None:
        """Append and rank at the same time, until `stopping`."""
        await asyncio.gather(self._grow(client, stopping), self._rank(client, stopping))

    async def _grow(self, client: AsyncClient, stopping: Callable[[], bool]) -> None:
        while not stopping():
            if self._stored == max(self._stages):
                self._user, self._stored = next(self._names), 0
            end = self._stored + STEP
            part = _part(self._whole, self._stored, end)
            append = functools.partial(
                client.events, self._user, part.items, part.timestamps,
                actions=part.actions, after=self._stored,
            )  # fmt: skip
            # After a failure it may be stored or not: then the same append is a conflict, or passes
            if await self._load.send(append, "append", ignored=CONFLICT) is not None:
                self._stored = end
            await asyncio.sleep(PAUSE_SECONDS)

    async def _rank(self, client: AsyncClient, stopping: Callable[[], bool]) -> None:
        candidates = next(iter(self._stages.values())).candidates
        while not stopping():
            user, least = self._user, self._stored
            if least:
                rank = functools.partial(client.rank, user, candidates)
                answer = await self._load.send(rank, "store")
                if isinstance(answer, RankAnswer):
                    self._check(answer, least)
            await asyncio.sleep(PAUSE_SECONDS / 3)

    def _check(self, answer: RankAnswer, least: int) -> None:
        stage = self._stages.get(answer.behaviours)
        if stage is None or answer.behaviours < least:
            stage = replace(self._stages[STEP], expected={}, versions={})  # wrong whatever it says
        self._load.tally.check(stage, answer)


def _part(history: HistoryMessage, begin: int, end: int) -> HistoryMessage:
    assert history.timestamps is not None
    actions = {name: values[begin:end] for name, values in history.actions.items()}
    return HistoryMessage(history.items[begin:end], history.timestamps[begin:end], actions)
