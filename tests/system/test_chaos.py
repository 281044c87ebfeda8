"""Chaos: a real bundle under load while instances and routers are killed and drained."""

from pathlib import Path

import pytest

from benchmarks.chaos.bench import measure, report
from benchmarks.chaos.course import Course, run_course
from benchmarks.chaos.load import Failure, Load, Tally, Visitor, largest_difference
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
LONG = Course(instance_kills=4, router_kills=3, between_kills=2.0, rolling=2, soak_seconds=20.0)


@pytest.mark.parametrize(
    "course", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_kills_and_drains_cost_no_score_and_lose_nothing(course: Course):
    verdict = measure(course, sessions=3, users=16, longest=400)
    assert verdict.tally.answered > 0
    assert verdict.tally.wrong == 0
    assert verdict.tally.unexplained(verdict.kill_times) == []
    assert (verdict.lost_in_rolling, verdict.lost_at_end) == (0, 0)
    recoveries = {kind: len(found) for kind, found in verdict.recoveries.items()}
    assert recoveries == {"instance": course.instance_kills, "router": course.router_kills}
    assert set(verdict.tally.hits) - {"inline"}, "nothing was ever found in a cache"
    claims = report(verdict, None)["claims"]
    assert {"wrong_scores", "lost_admitted", "recovery_seconds"} <= set(claims)


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


def test_only_failures_in_flight_at_a_kill_are_explained():
    tally = Tally(failures=[Failure(1.0, 2.0, "in flight"), Failure(5.0, 6.0, "not")])
    assert [failure.what for failure in tally.unexplained([1.5])] == ["not"]
    assert [failure.what for failure in tally.unexplained([1.5, 5.5])] == []


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
