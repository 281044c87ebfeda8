"""Kill instances and the router under load, drain them, and soak.

The questions: is every score right, is any admitted request lost, how soon do killed processes
answer again, does memory grow? Every score is compared with the full pass without a cache.
"""

import secrets
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.chaos.course import Course, Verdict, run_course, supervised
from benchmarks.chaos.load import Load, Visitor
from benchmarks.serving.bundle import random_bundle
from slipstream.bench import harness
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.messages import HistoryMessage
from slipstream.serving.supervisor import DeploymentConfig

FIRST_ID, NUM_ITEMS = 1 << 62, 2_000
MODEL = {
    "kind": "hstu",
    "dim": 64,
    "blocks": 2,
    "heads": 2,
    "max_len": 2_048,
    "time_bias": "own",
    "time_buckets": 64,
    "divisor": 100.0,
}
CANDIDATES = 50
MIB = 1 << 20


def visitors(engine: Engine, count: int, longest: int, seed: int = 0) -> list[Visitor]:
    """Make users with histories of many lengths, half of them stored, and their scores."""
    rng, found = np.random.default_rng(seed), []
    for number, length in enumerate(np.geomspace(1, longest, count).astype(int).tolist()):
        items = FIRST_ID + rng.integers(0, NUM_ITEMS, length)
        timestamps = 1_600_000_000 + np.cumsum(rng.integers(1, 100_000, length))
        actions = {
            name: (rng.random(length) < 0.4).astype(np.float32) for name in ("click", "like")
        }
        candidates = FIRST_ID + rng.permutation(NUM_ITEMS)[:CANDIDATES]
        expected = engine.rank(None, History(items, timestamps, actions), candidates)
        history = HistoryMessage(
            items.tolist(),
            timestamps.tolist(),
            {name: values.tolist() for name, values in actions.items()},
        )
        scores = {
            task: np.asarray(values, dtype=np.float64).tolist() for task, values in expected.items()
        }
        found.append(
            Visitor(
                f"visitor {number}", history, candidates.tolist(), scores, stored=bool(number % 2)
            )
        )
    return found


def plan(directory: Path, bundle: Path, key: str, **changes: Any) -> DeploymentConfig:
    """Plan two instances and a router, with a cache so small that every tier is in use."""
    model = {"device_bytes": 24 * MIB, "host_bytes": 64 * MIB, "ranking_budget": 0.002}
    settings = {
        "bundle": str(bundle),
        "history": f"sqlite:{directory / 'history.db'}",
        "model": model,
        "deadline_ms": 5_000.0,
    }
    return DeploymentConfig(
        2, settings, api_keys=(key,), router_settings={"deadline_ms": 5_000.0}, **changes
    )


def measure(
    course: Course, *, sessions: int = 4, think: float = 0.2, users: int = 40, longest: int = 1_500
) -> Verdict:
    """Run one course over a deployment of its own."""
    console = Console(stderr=True, highlight=False)

    def log(sentence: str) -> None:
        console.print(sentence, style="dim")

    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="slipstream-chaos-") as folder:
        directory = Path(folder)
        random_bundle(
            directory / "bundle", MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05
        )
        people = visitors(Engine(directory / "bundle"), users, longest)
        with supervised(plan(directory, directory / "bundle", key), log) as supervisor:
            load = Load(
                supervisor.url, key, people, sessions=sessions, think=think, deadline_ms=5_000.0
            )
            return run_course(supervisor, load, course, log)


def report(verdict: Verdict, json_path: Path | None) -> dict[str, Any]:
    """Make the table and the claims."""
    tally = verdict.tally
    recoveries = [seconds for found in verdict.recoveries.values() for seconds in found]
    unexplained = tally.unexplained(verdict.kill_times)
    rows: list[harness.Row] = [
        _row(f"kill -9 {kind}", len(found), f"back after at most {max(found):.2f} s", found)
        for kind, found in verdict.recoveries.items()
    ]
    rows.append(_row("requests lost when one instance drains", verdict.lost_in_rolling))
    rows.append(_row("requests lost when all drain", verdict.lost_at_end))
    rows.append(
        _row(
            "failed requests",
            len(tally.failures),
            f"{len(unexplained)} of them not in flight at a kill",
        )
    )
    rows.append(
        _row(
            "wrong scores",
            tally.wrong,
            f"of {tally.answered:,} answers, off by at most {tally.largest_difference:.1e}",
        )
    )
    rows.append(_row("answers by tier", tally.answered, _hits(tally.hits)))
    claims = {
        "wrong_scores": float(tally.wrong),
        "lost_admitted": float(verdict.lost_in_rolling + verdict.lost_at_end),
        "recovery_seconds": max(recoveries, default=0.0),
        "unexplained_failures": float(len(unexplained)),
    }
    if verdict.resident_bytes:
        totals = [sum(sample.values()) for sample in verdict.resident_bytes]
        text = f"MiB resident at the end of the soak, {verdict.growth():.3f} of its beginning"
        rows.append(
            _row("memory", round(totals[-1] / MIB), text, [float(total) for total in totals])
        )
        claims["soak_growth"] = verdict.growth()
    return harness.finish("chaos", rows, claims, json_path)


def _row(
    variant: str, count: int, text: str = "", samples: list[float] | None = None
) -> harness.Row:
    return {"variant": variant, "count": count, "": text, "samples": samples or []}


def _hits(hits: dict[str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in sorted(hits.items()))


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Run kills, drains and ten minutes of soak; `quick` soaks for ten seconds."""
    course = (
        Course(instance_kills=3, router_kills=2, soak_seconds=10.0)
        if quick
        else Course(6, 3, 3.0, 2, 600.0)
    )
    return report(measure(course), json_path)
