"""Kill, stop, reload, drain serving processes under load; take their clock, disk and store away.

The questions: is every score right, is any admitted request lost, how soon does everything work
again, does memory grow? Every score is compared with the full pass without a cache. The protocol is
in protocols/chaos.md.
"""

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.chaos.course import Course, Event, Verdict, run_course, supervised
from benchmarks.chaos.events import ClockJump, FullDisk, Reload, Stage, StoreOutage, put_in_place
from benchmarks.chaos.growing import STEP, GrowingUser
from benchmarks.chaos.jumping_clock import command, set_offset
from benchmarks.chaos.load import Load, Visitor
from benchmarks.chaos.outages import RedisProcess, can_mount, small_disk
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
DISK = "8m"
EVENTS = {
    "instance": "kill -9 of an instance",
    "router": "kill -9 of the router",
    "hang": "SIGSTOP of an instance",
    "reload": "reload under load",
    "clock": "jump of the clock",
    "disk": "full disk",
    "store": "kill -9 of Redis",
}


@dataclass(frozen=True)
class Pace:
    """How many sessions run at once, and how long each waits before it ranks."""

    sessions: int
    think: float


def visitors(
    engine: Engine, count: int, longest: int, seed: int = 0, others: Sequence[Engine] = ()
) -> list[Visitor]:
    """Make users with histories of many lengths, half of them stored, and their scores.

    `others` are engines of other versions that may answer.
    """
    rng, found = np.random.default_rng(seed), []
    for number, length in enumerate(np.geomspace(1, longest, count).astype(int).tolist()):
        history = random_history(rng, length)
        candidates = FIRST_ID + rng.permutation(NUM_ITEMS)[:CANDIDATES]
        found.append(
            expect(f"visitor {number}", history, candidates, [engine, *others], bool(number % 2))
        )
    return found


def random_history(rng: np.random.Generator, length: int) -> History:
    """Make up what a user did."""
    items = FIRST_ID + rng.integers(0, NUM_ITEMS, length)
    timestamps = 1_600_000_000 + np.cumsum(rng.integers(1, 100_000, length))
    actions = {name: (rng.random(length) < 0.4).astype(np.float32) for name in ("click", "like")}
    return History(items, timestamps, actions)


def expect(
    user: str, history: History, candidates: np.ndarray, engines: Sequence[Engine], stored: bool
) -> Visitor:
    """Score candidates without a cache, by each version that may be served."""
    message = HistoryMessage(
        history.items.tolist(),
        history.timestamps.tolist(),
        {name: values.tolist() for name, values in history.actions.items()},
    )
    scores = {
        engine.version: {
            task: np.asarray(values, dtype=np.float64).tolist()
            for task, values in engine.rank(None, history, candidates).items()
        }
        for engine in engines
    }
    first = scores[engines[0].version]
    return Visitor(user, message, candidates.tolist(), first, stored, scores)


def growing_stages(engines: Sequence[Engine], longest: int = 90) -> dict[int, Visitor]:
    """Return what is expected of a user by how many of the behaviours are stored."""
    rng = np.random.default_rng(5)
    whole, candidates = random_history(rng, longest), FIRST_ID + rng.permutation(NUM_ITEMS)[:20]
    return {
        end: expect("growing", whole.part(0, end), candidates, engines, stored=True)
        for end in range(STEP, longest + 1, STEP)
    }


def plan(
    bundle: Path, history: str, keys: tuple[str, str], clock: Path, **changes: Any
) -> DeploymentConfig:
    """Plan two instances and a router, with a cache so small that every tier is in use."""
    model = {"device_bytes": 24 * MIB, "host_bytes": 64 * MIB, "ranking_budget": 0.002}
    settings = {
        "bundle": str(bundle),
        "history": history,
        "model": model,
        "deadline_ms": 5_000.0,
    }
    return DeploymentConfig(
        2,
        settings,
        api_keys=(keys[0], f"{keys[1]} role=admin"),
        router_settings={"deadline_ms": 5_000.0},
        instance_command=command("slipstream.serving.http.instance_process", clock),
        router_command=command("slipstream.serving.http.router_process", clock),
        **changes,
    )


class Scene:
    """Bundles, users and their scores, and the deployments that are disturbed over them."""

    def __init__(self, directory: Path, users: int, longest: int) -> None:
        self._directory = directory
        self._versions = (directory / "first", directory / "second")
        for seed, version in enumerate(self._versions):
            random_bundle(
                version, MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05, seed=seed
            )
        engines = [Engine(version) for version in self._versions]
        self._people = visitors(engines[0], users, longest, others=engines[1:])
        self._stages = growing_stages(engines)
        self._keys = (secrets.token_hex(16), secrets.token_hex(16))
        self._clock = directory / "clock"
        self._bundle = directory / "bundle"
        console = Console(stderr=True, highlight=False)
        self._log: Callable[[str], None] = lambda sentence: console.print(sentence, style="dim")

    def run_sqlite(self, course: Course, pace: Pace) -> Verdict:
        """Run the course over a store of SQLite, on a small disk where that can be made."""
        place = self._directory / "disk"
        mounted = bool(course.full_disks) and can_mount()
        if course.full_disks and not mounted:
            self._log("no disk is filled: a small one needs root")
        with small_disk(place, DISK) if mounted else contextlib.nullcontext():
            place.mkdir(exist_ok=True)
            return self._run(
                f"sqlite:{place / 'history.db'}",
                course,
                pace,
                lambda stage: [
                    *(Reload(stage, number) for number in range(course.reloads)),
                    *(ClockJump(stage, number) for number in range(course.clock_jumps)),
                    *(FullDisk(stage, number) for number in range(course.full_disks * mounted)),
                ],
            )

    def run_redis(self, kills: int, pace: Pace, verdict: Verdict) -> None:
        """Kill the store of a deployment over Redis."""
        redis = RedisProcess(self._directory / "redis")
        redis.start()
        stored = [visitor for visitor in self._people if visitor.stored]
        try:
            self._run(
                redis.url,
                Course(0, 0, 1.0, 0),
                pace,
                lambda stage: [StoreOutage(stage, redis, stored)] * kills,
                verdict,
            )
        finally:
            redis.kill()

    def _run(
        self,
        history: str,
        course: Course,
        pace: Pace,
        events: Callable[[Stage], Sequence[Event]],
        verdict: Verdict | None = None,
    ) -> Verdict:
        put_in_place(self._versions[0], self._bundle)
        set_offset(self._clock, 0.0)
        config = plan(self._bundle, history, self._keys, self._clock)
        with supervised(config, self._log) as supervisor:
            load = Load(
                supervisor.url,
                self._keys[0],
                self._people,
                sessions=pace.sessions,
                think=pace.think,
                deadline_ms=5_000.0,
                tally=None if verdict is None else verdict.tally,
            )
            load.companions.append(GrowingUser(self._stages, load))
            stage = Stage(
                supervisor.url,
                self._keys[1],
                self._bundle,
                self._versions,
                self._directory / "disk",
                self._clock,
                self._log,
            )
            return run_course(supervisor, load, course, self._log, events(stage), verdict)


def measure(
    course: Course, *, sessions: int = 4, think: float = 0.2, users: int = 40, longest: int = 1_500
) -> Verdict:
    """Run one course over deployments of its own."""
    pace = Pace(sessions, think)
    with tempfile.TemporaryDirectory(prefix="slipstream-chaos-") as folder:
        scene = Scene(Path(folder), users, longest)
        verdict = scene.run_sqlite(course, pace)
        if course.store_kills:
            scene.run_redis(course.store_kills, pace, verdict)
        return verdict


def report(verdict: Verdict, json_path: Path | None) -> dict[str, Any]:
    """Make the table and the claims."""
    tally = verdict.tally
    recoveries = [seconds for found in verdict.recoveries.values() for seconds in found]
    unexplained = tally.unexplained(verdict.disturbances)
    for failure in unexplained:
        ago = min((failure.began - each.end for each in verdict.disturbances), key=abs, default=0.0)
        harness.note(f"unexplained, {ago:+.2f} s from the end of a disturbance: {failure.what}")
    rows: list[harness.Row] = [
        _row(EVENTS[event], len(found), f"works again after at most {max(found):.2f} s", found)
        for event, found in verdict.recoveries.items()
    ]
    rows += [
        _row(f"requests lost: {EVENTS[event]}", count) for event, count in verdict.lost.items()
    ]
    rows.append(_row("requests lost when one instance drains", verdict.lost_in_rolling))
    rows.append(_row("requests lost when all drain", verdict.lost_at_end))
    rows.append(
        _row(
            "failed requests",
            len(tally.failures),
            f"{len(unexplained)} of them by nothing that was broken meanwhile",
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
        "lost_admitted": float(
            verdict.lost_in_rolling + verdict.lost_at_end + sum(verdict.lost.values())
        ),
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
    """Run kills, events, drains and a minute of soak; `quick` fewer, and a soak of ten seconds."""
    events = {"hangs": 1, "reloads": 1, "clock_jumps": 3, "full_disks": 1, "store_kills": 1}
    course = (
        Course(instance_kills=2, router_kills=1, soak_seconds=10.0, **events)
        if quick
        else Course(6, 3, 3.0, 2, 60.0, **{**events, "hangs": 2, "reloads": 3})
    )
    return report(measure(course), json_path)
