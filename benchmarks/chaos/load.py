"""The load of the chaos benchmark: sessions that pre-infer, wait, rank and check every score.

Touch this when a session should send other requests.
"""

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slipstream.serving.http.client import AsyncClient, RefusalError, UnreachableError
from slipstream.serving.http.messages import HistoryMessage, RankAnswer

Answer = TypeVar("Answer")
TOLERANCE = 1e-5  # of a score, where it is not equal bit for bit


@dataclass(frozen=True)
class Visitor:
    """A user whose scores are known: `expected` comes from the full pass without a cache."""

    user: str
    history: HistoryMessage
    candidates: list[int]
    expected: Mapping[str, Sequence[float]]
    stored: bool


@dataclass(frozen=True)
class Failure:
    """A request without an answer: when it was sent, when it failed, and the reason."""

    began: float
    ended: float
    what: str


@dataclass
class Tally:
    """Counts of answers and failures."""

    answered: int = 0
    wrong: int = 0
    largest_difference: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)

    def check(self, visitor: Visitor, answer: RankAnswer) -> None:
        """Count an answer, and whether its scores are the expected ones."""
        self.answered += 1
        self.hits[answer.hit] = self.hits.get(answer.hit, 0) + 1
        difference = largest_difference(visitor.expected, answer.scores)
        self.largest_difference = max(self.largest_difference, difference)
        self.wrong += not difference <= TOLERANCE

    def unexplained(self, kills: Sequence[float], slack: float = 0.05) -> list[Failure]:
        """Return failures of requests that were not in flight when something was killed."""
        return [
            f
            for f in self.failures
            if not any(f.began - slack <= kill <= f.ended + slack for kill in kills)
        ]


def largest_difference(
    expected: Mapping[str, Sequence[float]], got: Mapping[str, Sequence[float]]
) -> float:
    """Return the largest difference over all tasks and candidates.

    It is infinite where tasks or counts differ, or a score is not a number.
    """
    if set(expected) != set(got) or any(len(expected[task]) != len(got[task]) for task in expected):
        return float("inf")
    differences = [
        abs(a - b) for task in expected for a, b in zip(expected[task], got[task], strict=True)
    ]
    return max(differences, default=0.0) if all(d == d for d in differences) else float("inf")


class Load:
    """`sessions` visitors at a time, each sending one request after the other, until `stop`."""

    def __init__(
        self,
        url: str,
        key: str,
        visitors: Sequence[Visitor],
        *,
        sessions: int,
        think: float,
        deadline_ms: float,
    ) -> None:
        self.tally = Tally()
        self._url, self._key, self._visitors = url, key, visitors
        self._sessions, self._think, self._deadline_ms = sessions, think, deadline_ms
        self._stopping = False

    async def store_histories(self) -> None:
        """Store the histories of stored visitors through the server."""
        async with AsyncClient(self._url, self._key) as client:
            for visitor in self._visitors:
                if visitor.stored:
                    h = visitor.history
                    await client.events(
                        visitor.user, h.items, h.timestamps, actions=h.actions, after=0
                    )

    async def run(self) -> None:
        """Send requests until `stop` is called and every running request has ended."""
        async with AsyncClient(
            self._url, self._key, self._deadline_ms, connections=self._sessions
        ) as client:
            await asyncio.gather(
                *(self._session(client, random.Random(number)) for number in range(self._sessions))
            )

    def stop(self) -> None:
        """Start no new request."""
        self._stopping = True

    async def _session(self, client: AsyncClient, rng: random.Random) -> None:
        while not self._stopping:
            visitor = rng.choice(self._visitors)
            history = None if visitor.stored else visitor.history
            early = await self._send(functools.partial(client.preinfer, visitor.user, history))
            await asyncio.sleep(rng.uniform(0, self._think))
            if self._stopping:
                return
            ticket = early.ticket if early is not None else None
            rank = functools.partial(
                client.rank, visitor.user, visitor.candidates, history, ticket=ticket
            )
            answer = await self._send(rank)
            if answer is not None:
                self.tally.check(visitor, answer)

    async def _send(self, request: Callable[[], Awaitable[Answer]]) -> Answer | None:
        began = time.monotonic()
        try:
            answer = await request()
        except (RefusalError, UnreachableError) as error:
            self.tally.failures.append(Failure(began, time.monotonic(), str(error)))
            await asyncio.sleep(0.05)
            return None
        self.tally.successes.append(time.monotonic())
        return answer
