"""An open-loop generator for `/v1/recommend`: pages at scheduled times, whatever the server does.

Touch this when the protocol's traces change.
"""

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from slipstream.serving.http.client import AsyncClient, RefusalError, UnreachableError

PAGES, GAP, EARLY, MISSED = 3, 4.0, 0.1, 1.0


@dataclass(frozen=True)
class Page:
    """A page that a user asks for `at` seconds after the start."""

    at: float
    user: str
    number: int  # of the user's pages


@dataclass
class Measured:
    """Latencies of pages from their scheduled times, how late the generator was, failures."""

    seconds: list[float]
    late: list[float]
    failed: int = 0


def make_trace(kind: str, rate: float, seconds: float) -> list[Page]:
    """Return the pages of a trace: Poisson arrivals, of sessions or of users who come once."""
    generator, pages, at, number = np.random.default_rng(1), [], 0.0, 0
    each = PAGES if kind == "sessions" else 1
    while at < seconds:
        at += float(generator.exponential(each / rate))
        pages += [Page(at + GAP * page, f"u{number}", page) for page in range(each)]
        number += 1
    return sorted((page for page in pages if page.at < seconds), key=lambda page: page.at)


async def replay(
    url: str, trace: list[Page], *, signals: bool, warm_up: float, items: int
) -> Measured:
    """Ask for every page at its time; with `signals`, announce it before."""
    measured = Measured([], [])
    start = time.perf_counter() + 2 * EARLY

    async def until(moment: float) -> None:
        await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))

    async def ask(client: AsyncClient, page: Page) -> None:
        await until(page.at - EARLY)
        try:
            if page.number:
                await client.events(page.user, [page.number * 17 % items])
            if signals:
                await client.preinfer(page.user, rank_in_ms=1_000 * EARLY)
        except (RefusalError, UnreachableError):
            pass  # the page is asked for all the same
        await until(page.at)
        late = time.perf_counter() - start - page.at
        seconds = MISSED
        try:
            await client.recommend(page.user, 10)
            seconds = time.perf_counter() - start - page.at
        except (RefusalError, UnreachableError):
            measured.failed += page.at >= warm_up
        if page.at >= warm_up:
            measured.seconds.append(seconds)
            measured.late.append(late)

    async with AsyncClient(url, deadline_ms=1_000 * MISSED) as client:
        await asyncio.gather(*(ask(client, page) for page in trace))
    return measured
