"""Honest users of an attacked server: rankings at scheduled times, every score checked.

Touch this when honest users should ask for something else.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.chaos.load import Tally, Visitor
from slipstream.serving.http.client import AsyncClient, RefusalError, UnreachableError

MISSED_SECONDS = 5.0  # what a request without an answer counts, and its deadline


@dataclass
class HonestWindow:
    """What honest users saw: seconds from each scheduled arrival, failures, scores."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @property
    def p99(self) -> float:
        """Return the 99th percentile of the latencies, a measured one."""
        return float(np.quantile(self.seconds, 0.99, method="higher"))


def arrivals(rate: float, seconds: float) -> list[float]:
    """Return the moments of Poisson arrivals, the same at every call."""
    generator = np.random.default_rng(17)
    gaps = generator.exponential(1.0 / rate, int(2 * rate * seconds) + 100)
    return [float(moment) for moment in np.cumsum(gaps) if moment < seconds]


async def visit(
    url: str,
    key: str,
    visitors: Sequence[Visitor],
    moments: Sequence[float],
    warm_up: float = 0.0,
) -> HonestWindow:
    """Rank for a user at every moment, whatever the server does; those of `warm_up` count not."""
    window, start = HonestWindow(), time.perf_counter() + 0.1

    async def ask(client: AsyncClient, moment: float, visitor: Visitor) -> None:
        await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
        taken = MISSED_SECONDS
        try:
            answer = await client.rank(visitor.user, visitor.candidates, visitor.history)
            taken = time.perf_counter() - start - moment
            window.tally.check(visitor, answer)
        except (RefusalError, UnreachableError) as error:
            window.failures.append(str(error))
        if moment >= warm_up:
            window.seconds.append(taken)

    async with AsyncClient(url, key, deadline_ms=1_000 * MISSED_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, moment, visitors[number % len(visitors)])
                for number, moment in enumerate(moments)
            )
        )
    return window
