"""Chaos: a real bundle under load while instances and routers are killed and drained."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from benchmarks.chaos.bench import measure, report
from benchmarks.chaos.course import Course, run_course
from benchmarks.chaos.growing import GrowingUser
from benchmarks.chaos.jumping_clock import set_offset, shifted_clock
from benchmarks.chaos.load import (
    Disturbance,
    Failure,
    Load,
    Need,
    Tally,
    Visitor,
    largest_difference,
)
from benchmarks.chaos.outages import can_mount
from slipstream.serving.http.messages import HistoryMessage, RankAnswer
from tests.support.serving_fixtures import KEY, deployment
from tests.support.serving_stand_in import standin_scores


def visitor(number: int, **changes: object) -> Visitor:
    history = HistoryMessage(list(range(number, number + 5)), [1, 2, 3, 4, 5])
    expected = {"score": standin_scores(history.items, history.timestamps, [1, 2, 3])}
    return Visitor(
        f"v{number}", history, [1, 2, 3], changes.get("expected", expected), stored=bool(number % 2)
    )  # type: ignore[arg-type]


SHORT = Course(instance_kills=1, router_kills=1, between_kills=0.5, rolling=1)
EVENTS = {"hangs": 1, "reloads": 1, "clock_jumps": 3, "full_disks": 1, "store_kills": 1}
OTHER = Course(0, 0, between_kills=0.5, rolling=0, **EVENTS)
LONG = Course(instance_kills=4, router_kills=3, between_kills=2.0, rolling=2, soak_seconds=20.0)


@pytest.mark.parametrize(
    "course", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_kills_and_drains_cost_no_score_and_lose_nothing(course: Course):
    verdict = measure(course, sessions=3, users=16, longest=400)
    assert verdict.tally.answered > 0
    assert verdict.tally.wrong == 0
    assert verdict.tally.unexplained(verdict.disturbances) == []
    assert (verdict.lost_in_rolling, verdict.lost_at_end) == (0, 0)
    recoveries = {kind: len(found) for kind, found in verdict.recoveries.items()}
    assert recoveries == {"instance": course.instance_kills, "router": course.router_kills}
    assert set(verdict.tally.hits) - {"inline"}, "nothing was ever found in a cache"
    claims = report(verdict, None)["claims"]
    assert {"wrong_scores", "lost_admitted", "recovery_seconds"} <= set(claims)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_hangs_reloads_jumps_and_outages_cost_no_score_and_lose_nothing():
    """Behaviours are appended meanwhile to a user who is ranked."""
    verdict = measure(OTHER, sessions=3, users=16, longest=400)
    assert verdict.tally.answered > 0
    assert verdict.tally.wrong == 0
    assert verdict.tally.unexplained(verdict.disturbances) == []
    assert verdict.lost == {"reload": 0, "clock": 0}
    assert verdict.lost_at_end == 0
    counts = {"hang": 1, "reload": 1, "clock": 3, "disk": int(can_mount()), "store": 1}
    recoveries = {kind: len(verdict.recoveries.get(kind, [])) for kind in counts}
    assert recoveries == counts
    claims = report(verdict, None)["claims"]
    assert (claims["wrong_scores"], claims["lost_admitted"]) == (0, 0)


def test_wrong_scores_are_noticed(tmp_path: Path):
    """The check can fail: visitors who expect other scores find every answer wrong."""
    people = [visitor(number, expected={"score": [0.1, 0.2, 0.3]}) for number in range(4)]
    with deployment(tmp_path) as supervisor:
        load = Load(supervisor.url, KEY, people, sessions=2, think=0.01, deadline_ms=60_000)
        verdict = run_course(
            supervisor,
            load,
            Course(0, 0, 0.0, 0, soak_seconds=1.0, sample_seconds=0.1),
            lambda _sentence: None,
        )
    assert verdict.tally.wrong == verdict.tally.answered > 0
    assert verdict.resident_bytes and verdict.growth() > 0


def test_only_failures_of_what_was_broken_are_explained():
    tally = Tally(failures=[Failure(1.0, 2.0, "in flight"), Failure(5.0, 6.0, "not")])
    kills = [Disturbance(1.5, 1.5), Disturbance(5.5, 5.5)]
    assert [failure.what for failure in tally.unexplained(kills[:1])] == ["not"]
    assert [failure.what for failure in tally.unexplained(kills)] == []
    needs: tuple[Need, ...] = ("nothing", "store", "append")
    tally = Tally(failures=[Failure(1.0, 2.0, need, need) for need in needs])
    for breaks, left in (("nothing", 0), ("store", 1), ("append", 2)):
        broken = [Disturbance(0.0, 3.0, breaks)]  # type: ignore[arg-type]
        assert [failure.what for failure in tally.unexplained(broken)] == list(needs[:left])


class Answers:
    """Ranks from a store that holds fewer behaviours than it acknowledged, or others."""

    def __init__(self, behaviours: int, scores: list[float]) -> None:
        self.behaviours, self.scores = behaviours, scores

    async def events(self, *_given: object, **_more: object) -> str:
        return "stored"

    async def rank(self, *_given: object) -> RankAnswer:
        return RankAnswer({"a": self.scores}, "v", "i", "device", False, self.behaviours)


@pytest.mark.parametrize(
    ("behaviours", "scores", "right"),
    [(9, [9.0], True), (9, [8.0], False), (3, [3.0], False), (4, [4.0], False)],
    ids=["right", "other scores", "acknowledged ones are missing", "half an append"],
)
def test_a_growing_user_notices_lost_appends(behaviours: int, scores: list[float], right: bool):
    history = HistoryMessage(list(range(9)), list(range(9)))
    stages = {n: Visitor("g", history, [1], {"a": [float(n)]}, True) for n in (3, 6, 9)}
    load = Load("http://nowhere", "", [], sessions=0, think=0.0, deadline_ms=1.0)
    user = GrowingUser(stages, load)
    user._stored = 6

    async def rank_once() -> None:
        asked = iter([False, True])
        await user._rank(Answers(behaviours, scores), lambda: next(asked))  # type: ignore[arg-type]

    asyncio.run(rank_once())
    assert (load.tally.answered, load.tally.wrong) == (1, int(not right))


def test_a_clock_jumps_by_its_file(tmp_path: Path):
    set_offset(tmp_path / "clock", 0.0)
    read = shifted_clock(tmp_path / "clock")
    assert abs(read() - time.time()) < 60
    set_offset(tmp_path / "clock", -7_200.0)
    assert 7_100 < time.time() - read() < 7_300


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        ({"a": [1.0, 2.0]}, 0.0),
        ({"a": [1.0, 2.5]}, 0.5),
        ({"a": [1.0]}, float("inf")),
        ({"b": [1.0, 2.0]}, float("inf")),
        ({"a": [1.0, float("nan")]}, float("inf")),
    ],
)
def test_differences(got: dict[str, list[float]], difference: float):
    assert largest_difference({"a": [1.0, 2.0]}, got) == difference
    tally = Tally()
    tally.check(
        Visitor("v", HistoryMessage([], []), [1, 2], {"a": [1.0, 2.0]}, False),
        RankAnswer(got, "v", "i", "device", False, 0),
    )
    assert tally.wrong == (difference > 1e-5)
