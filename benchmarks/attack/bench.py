"""Honest users of `slipstream serve`, with and without attackers beside them.

Attackers hold connections, send heads and bodies a byte at a time, junk, giant headers and wrong
keys, from other addresses of loopback. The protocol is in protocols/attack.md. Touch this when
windows or claims change; the attacks are in attackers.py.
"""

import asyncio
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.attack.attackers import Attack, AttackPlan, AttackReport, start_attackers
from benchmarks.attack.honest import HonestWindow, arrivals, visit
from benchmarks.chaos.bench import FIRST_ID, MODEL, NUM_ITEMS, visitors
from benchmarks.chaos.load import Visitor
from benchmarks.process_figures import MemoryWatch, children, resident_bytes
from benchmarks.served import ServedProcess, served_process
from benchmarks.serving.bundle import random_bundle
from slipstream.bench import harness
from slipstream.serving.engine.engine import Engine

PAIRS, WINDOW_SECONDS, WARM_UP_SECONDS = 5, 20.0, 2.0
QUICK_PAIRS, QUICK_WINDOW_SECONDS, QUICK_WARM_UP_SECONDS = 1, 4.0, 1.0
RATE, USERS, LONGEST = 30.0, 24, 400
PAUSE_SECONDS, SAMPLE_SECONDS, CORES = 2.0, 0.5, 2
ATTACKS = [
    Attack("connections", "127.0.0.2", per_second=40),
    Attack("slow_head", "127.0.0.3", per_second=4),
    Attack("slow_body", "127.0.0.4", per_second=2),
    Attack("junk", "127.0.0.5", per_second=5),
    Attack("header", "127.0.0.6", per_second=0.5),
    Attack("no_key", "127.0.0.7", per_second=5),
]


@dataclass
class Measured:
    """Windows in pairs (quiet, attacked), what attackers saw, the router's memory."""

    quiet: list[HonestWindow] = field(default_factory=list)
    attacked: list[HonestWindow] = field(default_factory=list)
    reports: list[AttackReport] = field(default_factory=list)
    before_bytes: int = 0
    attacked_bytes: list[int] = field(default_factory=list)
    attack_seconds: float = 0.0


class Measurement:
    """One server, its honest users and its attackers."""

    def __init__(
        self, server: ServedProcess, key: str, people: list[Visitor], seconds: float, warm_up: float
    ) -> None:
        self._url, self._key, self._people = server.url, key, people
        self._seconds, self._warm_up = seconds, warm_up
        self._router = children(server.pid)["router_process"][0]
        self.measured = Measured()

    def run(self, pairs: int) -> Measured:
        """Measure all pairs, after a window that does not count."""
        harness.note("a window that does not count")
        self._window()
        self.measured.before_bytes = resident_bytes(self._router)
        for number in range(pairs):
            harness.note(f"pair {number + 1} of {pairs}")
            if number % 2:
                self._attacked()
                self.measured.quiet.append(self._window())
            else:
                self.measured.quiet.append(self._window())
                self._attacked()
        return self.measured

    def _window(self) -> HonestWindow:
        async def whole() -> HonestWindow:
            moments = arrivals(RATE, self._seconds)
            window = await visit(self._url, self._key, self._people, moments, self._warm_up)
            await asyncio.sleep(PAUSE_SECONDS)
            return window

        return asyncio.run(whole())

    def _attacked(self) -> None:
        port = urlsplit(self._url).port
        assert port is not None
        plan = AttackPlan(port, self._seconds, ATTACKS, self._key)
        watch = MemoryWatch(self._router, self.measured.attacked_bytes, SAMPLE_SECONDS)
        with start_attackers(plan) as attackers, watch:
            window = self._window()
            self.measured.reports.append(attackers.report())
        self.measured.attacked.append(window)
        self.measured.attack_seconds += self._seconds


def claims_of(measured: Measured) -> dict[str, float]:
    """Compute the claims from what was measured."""
    pairs = zip(measured.quiet, measured.attacked, strict=True)
    windows = [*measured.quiet, *measured.attacked]
    tallies = [tally for report in measured.reports for tally in report.tallies.values()]
    used = sum(report.processor_seconds for report in measured.reports)
    return {
        "refused": sum(t.refused for t in tallies) / max(1, sum(t.attempts for t in tallies)),
        "p99_ratio_honest": harness.median([hit.p99 / quiet.p99 for quiet, hit in pairs]),
        "memory_ratio": max(measured.attacked_bytes) / measured.before_bytes,
        "wrong_scores": float(sum(window.tally.wrong for window in windows)),
        "failed_honest": float(sum(len(window.failures) for window in windows)),
        "attackers_share": used / (CORES * measured.attack_seconds),
    }


def rows_of(measured: Measured) -> list[harness.Row]:
    """Make a row of each kind of window and of each attack."""
    rows: list[harness.Row] = []
    for variant, windows in (("quiet", measured.quiet), ("attacked", measured.attacked)):
        p99s = [1e3 * window.p99 for window in windows]
        every = [1e3 * taken for window in windows for taken in window.seconds]
        text = f"p50 {harness.median(every):.1f} ms, {len(every):,} requests"
        rows.append(
            {
                "variant": f"honest users, {variant}",
                "p99 ms": harness.median(p99s),
                "spread": harness.spread(p99s),
                "": text,
                "samples": p99s,
            }
        )
    for kind in measured.reports[0].tallies:
        tallies = [report.tallies[kind] for report in measured.reports]
        endings = {name for tally in tallies for name in tally.endings}
        told = {name: sum(t.endings.get(name, 0) for t in tallies) for name in sorted(endings)}
        text = " ".join(f"{name}:{count}" for name, count in told.items())
        rows.append(
            {
                "variant": kind,
                "": f"{sum(tally.attempts for tally in tallies):,} attempts {text}",
                "samples": [float(tally.refused) for tally in tallies],
            }
        )
    mib = measured.before_bytes / 2**20
    samples = [float(size) for size in measured.attacked_bytes]
    rows.append({"variant": "router", "": f"{mib:.0f} MiB before", "samples": samples})
    return rows


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure the pairs, print a table, write the JSON if a path is given."""
    pairs = QUICK_PAIRS if quick else PAIRS
    seconds = QUICK_WINDOW_SECONDS if quick else WINDOW_SECONDS
    warm_up = QUICK_WARM_UP_SECONDS if quick else WARM_UP_SECONDS
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="slipstream-attack-") as folder:
        bundle = Path(folder) / "bundle"
        harness.note("a bundle, its users, and `slipstream serve`")
        random_bundle(bundle, MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05)
        people = visitors(Engine(bundle), USERS, LONGEST)
        options = ("--deadline-ms", "5000", "--state", str(Path(folder) / "state"))
        with served_process(bundle, *options, key=key) as server:
            measured = Measurement(server, key, people, seconds, warm_up).run(pairs)
    return harness.finish("attack", rows_of(measured), claims_of(measured), json_path)
