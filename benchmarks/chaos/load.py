"""The load of the chaos benchmark: sessions that pre-infer, wait, rank and check every score.

Touch this when a session should send other requests.
"""

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from slipstream.serving.http.client import AsyncClient, RefusalError, UnreachableError
from slipstream.serving.http.messages import HistoryMessage, PreinferAnswer, RankAnswer

Answer = TypeVar("Answer")
Need = Literal["nothing", "store", "append"]  # what a request cannot do without
TOLERANCE = 1e-5  # of a score, where it is not equal bit for bit


@dataclass(frozen=True)
class Visitor:
    """A user whose scores are known: `expected` comes from the full pass without a cache.

    `versions` are the scores of other versions that may be served.
    """

    user: str
    history: HistoryMessage
    candidates: list[int]
    expected: Mapping[str, Sequence[float]]
    stored: bool
    versions: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A request without an answer: when it was sent, when it failed, the reason, what it needed."""

    began: float
    ended: float
    what: str
    needs: Need = "nothing"


@dataclass(frozen=True)
class Disturbance:
    """What was broken from `begin` to `end`; it explains failures of requests that needed it."""

    begin: float
    end: float
    breaks: Need = "nothing"

    def explains(self, failure: Failure, slack: float = 0.05) -> bool:
        """Whether a request was under way meanwhile and could not do without."""
        needed = {"nothing": ("nothing", "store", "append"), "store": ("store", "append")}
        meanwhile = failure.began - slack <= self.end and self.begin <= failure.ended + slack
        return meanwhile and failure.needs in needed.get(self.breaks, ("append",))


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
        expected = visitor.versions.get(answer.version, visitor.expected)
        difference = largest_difference(expected, answer.scores)
        self.largest_difference = max(self.largest_difference, difference)
        self.wrong += not difference <= TOLERANCE

    def unexplained(self, disturbances: Sequence[Disturbance], first: int = 0) -> list[Failure]:
        """Return failures, from a number on, of requests that nothing disturbed."""
        return [
            failure
            for failure in self.failures[first:]
            if not any(each.explains(failure) for each in disturbances)
        ]


class Companion(Protocol):
    """Sends requests beside the sessions."""

    async def run(self, client: AsyncClient, stopping: Callable[[], bool]) -> None:
        """Send requests until `stopping`."""


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
        tally: Tally | None = None,
    ) -> None:
        self.tally = tally or Tally()
        self.companions: list[Companion] = []
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
            self._url,
            self._key,
            self._deadline_ms,
            connections=self._sessions + 2 * len(self.companions),
        ) as client:
            await asyncio.gather(
                *(self._session(client, random.Random(number)) for number in range(self._sessions)),
                *(each.run(client, lambda: self._stopping) for each in self.companions),
            )

    def stop(self) -> None:
        """Start no new request."""
        self._stopping = True

    async def _session(self, client: AsyncClient, rng: random.Random) -> None:
        while not self._stopping:
            visitor = rng.choice(self._visitors)
            history = None if visitor.stored else visitor.history
            needs: Need = "store" if visitor.stored else "nothing"
            announce = functools.partial(client.preinfer, visitor.user, history)
            early = await self.send(announce, needs)
            await asyncio.sleep(rng.uniform(0, self._think))
            if self._stopping:
                return
            ticket = early.ticket if isinstance(early, PreinferAnswer) else None
            rank = functools.partial(
                client.rank, visitor.user, visitor.candidates, history, ticket=ticket
            )
            answer = await self.send(rank, needs)
            if isinstance(answer, RankAnswer):
                self.tally.check(visitor, answer)

    async def send(
        self, request: Callable[[], Awaitable[Answer]], needs: Need, ignored: int | None = None
    ) -> Answer | Literal["ignored"] | None:
        """Send a request and note how it ended; None where it failed.

        A refusal of the status `ignored` is no failure.
        """
        began = time.monotonic()
        try:
            answer = await request()
        except (RefusalError, UnreachableError) as error:
            if isinstance(error, RefusalError) and error.status == ignored:
                return "ignored"
            self.tally.failures.append(Failure(began, time.monotonic(), str(error), needs))
            await asyncio.sleep(0.05)
            return None
        self.tally.successes.append(time.monotonic())
        return answer
