"""Parts of the serving benchmark, and a small run against real processes."""

import asyncio

import numpy as np

from benchmarks.serving.bundle import random_bundle
from benchmarks.serving.load import Cascade, Outcome, loadgen_at_hand, loadgen_server, open_loop
from benchmarks.serving.plot import best_of, draw, fixed_rate
from benchmarks.serving.search import Bisection
from benchmarks.serving.trace import (
    PAGE,
    Histories,
    Request,
    Session,
    poisson,
    replay,
    sessions_of,
    synthetic_sessions,
)
from benchmarks.serving.worker import Fleet

MODEL = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 1, "max_len": 400, "time_buckets": 32}
SMALL = {
    "device_bytes": 8 << 20,
    "host_bytes": 8 << 20,
    "calibrate_seconds": 0.1,
    "trigger": {"enabled": False},
}


def test_sessions_are_cut_at_users_and_long_gaps():
    users = np.array([2, 1, 1, 1, 2] + [3] * (PAGE + 1))
    times = np.array([50.0, 0.0, 10.0, 5000.0, 60.0, *np.arange(PAGE + 1) * 10.0 + 100])
    found = sessions_of(users, times)
    assert [(s.user, s.start, s.pages) for s in found] == [
        (1, 0.0, (0.0,)),
        (2, 50.0, (0.0,)),
        (3, 100.0, (0.0, PAGE * 10.0)),
        (1, 5000.0, (0.0,)),
    ]


def test_replay_keeps_rate_and_order_of_pages():
    requests = replay(synthetic_sessions(), rate=40.0, seconds=30.0, seed=3)
    assert 0.6 < len(requests) / 1200 < 1.4
    seen: dict[int, int] = {}
    for request in requests:
        assert 0 <= request.at < 30 and request.page > seen.get(request.user, -1)
        seen[request.user] = request.page
    timed = poisson(requests, 40.0)
    assert [r.user for r in timed] == [r.user for r in requests]
    assert 0.8 < timed[-1].at / (len(timed) / 40.0) < 1.2


def test_histories_grow_and_are_the_same_everywhere():
    one, two = (Histories(100, 1 << 40, 50, ("click",), 400) for _ in range(2))
    first, later = one.of(7, 0), two.of(7, 3)
    assert len(later) == len(first) + 3 * PAGE
    assert np.array_equal(later.items[: len(first)], first.items)
    assert np.array_equal(one.candidates(7, 3, 5), two.candidates(7, 3, 5))


def test_misses_count_for_the_percentile():
    outcome = Outcome(10.0, latencies=[0.01] * 99 + [float("inf")])
    assert outcome.percentile(0.99) == 10.0 and outcome.goodput == 0.99
    assert outcome.holds
    outcome.latencies[0] = float("inf")
    assert not outcome.holds
    assert not Outcome(10.0, latencies=[0.01], cut_short=True).holds


def test_a_bisection_finds_the_edge():
    search = Bisection(1.0, 64.0)
    for _ in range(10):
        search.note(search.middle <= 20.0)
    assert 19.5 < search.best <= 20.0
    hopeless = Bisection(1.0, 64.0)
    hopeless.note(False)
    assert hopeless.best == 0.0


def test_a_run_that_has_missed_too_often_ends_there():
    class Slow:
        outcome = Outcome(1000.0)

        async def run(self, request: object, arrival: float) -> float:
            self.outcome.latencies.append(float("inf"))
            return float("inf")

    requests = [Request(number / 1000, number, 0) for number in range(400)]
    outcome = asyncio.run(open_loop(Slow(), requests, give_up=True))  # type: ignore[arg-type]
    assert outcome.cut_short and 4 < len(outcome.latencies) < 400


def test_every_rate_meets_the_same_mix_of_visits():
    sessions = [
        Session(user, float(user), (0.0,) * (1 if user < 500 else 5)) for user in range(1000)
    ]
    for rate in (10.0, 50.0, 200.0):
        requests = replay(sessions, rate, 30.0)
        assert 0.85 < len(requests) / (30 * rate) < 1.15


def test_a_small_run_against_two_processes(tmp_path):
    bundle = tmp_path / "bundle"
    random_bundle(bundle, MODEL, num_items=50)
    requests = poisson(replay(synthetic_sessions(200), 20.0, 6.0), 20.0)[:30]

    async def scenario():
        async with Fleet(2, bundle, 10, 1 << 40, 50) as fleet:
            measured = await fleet.configure(SMALL, 200, expander=True)
            assert measured["inline_ms"] > 0
            cascade, checked = (
                Cascade(
                    fleet,
                    stages=0.02,
                    slo=20.0,
                    route="affinity",
                    outcome=Outcome(20.0),
                    size=lambda user, page: 100,
                )
                for _ in range(2)
            )
            own = await open_loop(cascade, requests)
            stats, difference = await fleet.stats(), await fleet.score_diff()
            if loadgen_at_hand():
                await loadgen_server(checked, requests, 20.0, 0.5, tmp_path)
            return own, stats, difference, checked.outcome

    own, stats, difference, theirs = asyncio.run(asyncio.wait_for(scenario(), 250))
    assert len(own.latencies) == 30 and not own.errors
    assert sum(own.hits.values()) == 30 and own.hits["inline"] < 30
    assert stats["preinfer_admitted"] > 0
    assert difference == 0.0
    if loadgen_at_hand():
        assert theirs.verdict in ("VALID", "INVALID") and theirs.latencies


def test_the_curves_are_drawn(tmp_path):
    rows = [
        {"variant": v, "rate": r, "length": n, "p99_ms": p, "load": load}
        for v, r, n, p, load in [
            ("relay", 5.0, 100, 20.0, "own"),
            ("relay", 9.0, 100, 90.0, "own"),
            ("relay", 9.0, 100, 60.0, "own"),
            ("relay", 9.0, 100, 61.0, "LoadGen"),
            ("without", 5.0, 100, float("inf"), "own"),
            ("relay", 5.0, 200, 30.0, "own"),
        ]
    ]
    assert fixed_rate(rows) == 5.0 and best_of([(9.0, 90.0), (5.0, 20.0), (9.0, 60.0)]) == [
        (5.0, 20.0),
        (9.0, 60.0),
    ]
    draw(rows, tmp_path / "curves.png", 0.08)
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
