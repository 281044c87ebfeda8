"""Recorded benchmarks run when they are due; quick runs are held against what is recorded."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import evidence_run
from benchmarks.evidence_plan import BENCHMARKS, Benchmark, Held, exactly, higher, lower
from benchmarks.evidence_run import check, chosen, run_due, why_due
from slipstream.errors import SlipstreamError

DEMO = Benchmark(
    "demo",
    ("benchmarks.demo",),
    ("benchmarks/demo.py",),
    3,
    (*higher("speedup"), *lower("cost"), *exactly("lower", "wrong")),
)
OTHER = Benchmark("other", ("benchmarks.other",), ("benchmarks/other.py",), 4)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def record(path: Path, hour: int = 12, **claims: float) -> None:
    """Write a made-up result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"when": NOON.replace(hour=hour).isoformat(), "claims": claims, "rows": []})
    )


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All code and protocols were committed at noon."""
    monkeypatch.setattr(evidence_run, "changed_at", lambda benchmark: NOON)


class Runs:
    """Stands for the benchmarks' processes: writes claims, one set after the other."""

    def __init__(self, *claims: dict[str, float], failing: str | None = None) -> None:
        self.claims, self.failing, self.ran = list(claims), failing, list[tuple[str, bool]]()

    def __call__(self, benchmark: Benchmark, path: Path, quick: bool) -> None:
        self.ran.append((benchmark.name, quick))
        if benchmark.name == self.failing:
            raise SlipstreamError(f"{benchmark.name} ended with exit code 1")
        record(path, 13, **(self.claims.pop(0) if self.claims else {}))


@pytest.mark.usefixtures("committed")
def test_a_result_is_good_until_its_code_or_protocol_changes(tmp_path, monkeypatch):
    assert why_due(DEMO, tmp_path) == "no result"
    record(tmp_path / "demo.json", 11)
    assert "changed" in (why_due(DEMO, tmp_path) or "")
    record(tmp_path / "demo.json", 13)
    assert why_due(DEMO, tmp_path) is None
    monkeypatch.setattr(evidence_run, "changed_at", lambda benchmark: None)
    assert "not committed" in (why_due(DEMO, tmp_path) or "")


@pytest.mark.skipif(not (evidence_run.ROOT / ".git").exists(), reason="no checkout")
def test_git_says_when_a_benchmark_changed():
    known = next(one for one in BENCHMARKS if one.name == "recommend")
    assert evidence_run.git("log", "-1", "--format=%h", "--", *known.sources, known.protocol)


@pytest.mark.usefixtures("committed")
def test_a_stopped_run_goes_on_where_it_was(tmp_path, capsys):
    stopped = Runs(failing="other")
    assert run_due([DEMO, OTHER], tmp_path, force=False, run=stopped) == ["other"]
    assert stopped.ran == [("demo", False), ("demo", True), ("other", False)]
    again = Runs()
    assert run_due([DEMO, OTHER], tmp_path, force=False, run=again) == []
    assert again.ran == [("other", False)]  # nothing is held of it: no quick run
    assert "1 of 2 benchmarks are due, about 4 minutes" in capsys.readouterr().out
    forced = Runs()
    run_due([DEMO], tmp_path, force=True, run=forced)
    assert forced.ran == [("demo", False), ("demo", True)]


def test_what_fell_by_more_than_the_tolerance_is_named(tmp_path, capsys):
    record(tmp_path / "quick" / "demo.json", speedup=4.0, cost=1.0, wrong=0.0)
    kept = {"speedup": 3.1, "cost": 1.2, "wrong": 0.0}
    assert check([DEMO, OTHER], tmp_path, Runs(kept)) == []
    fallen = {"speedup": 2.9, "cost": 1.3, "wrong": 1.0}
    runs = Runs(fallen, fallen)
    assert check([DEMO], tmp_path, runs) == ["demo.speedup", "demo.cost", "demo.wrong"]
    assert runs.ran == [("demo", True)] * 2
    assert "FELL demo.speedup: 2.9, recorded 4 (at least 3)" in capsys.readouterr().out


def test_a_figure_that_fell_once_is_measured_again(tmp_path):
    record(tmp_path / "quick" / "demo.json", speedup=4.0, cost=1.0, wrong=0.0)
    first = {"speedup": 1.0, "cost": 1.0, "wrong": 0.0}
    second = {"speedup": 4.0, "cost": 9.0, "wrong": 0.0}
    assert check([DEMO], tmp_path, Runs(first, second)) == []


def test_a_lost_figure_and_a_failed_run_have_fallen(tmp_path):
    record(tmp_path / "quick" / "demo.json", speedup=4.0)
    assert check([DEMO], tmp_path, Runs({}, {})) == ["demo.speedup"]
    assert check([DEMO], tmp_path, Runs(failing="demo")) == ["demo"]
    assert Held("x", "higher").fell(1.0, float("nan"))


def test_times_of_a_full_run_are_not_compared_with_a_quick_one(tmp_path, capsys):
    record(tmp_path / "demo.json", speedup=40.0, cost=0.1, wrong=0.0)
    assert check([DEMO], tmp_path, Runs({"speedup": 4.0, "cost": 1.0, "wrong": 0.0})) == []
    assert "?  demo.speedup: no quick run is recorded" in capsys.readouterr().out
    wrong = {"speedup": 4.0, "cost": 1.0, "wrong": 2.0}
    assert check([DEMO], tmp_path, Runs(wrong, wrong)) == ["demo.wrong"]


def test_what_was_never_recorded_is_not_run(tmp_path):
    runs = Runs()
    assert check([DEMO], tmp_path, runs) == [] and runs.ran == []


def test_an_unknown_name_is_refused():
    assert [one.name for one in chosen(["hit", "tables"])] == ["tables", "hit"]
    with pytest.raises(SlipstreamError, match="no recorded benchmark 'table'"):
        chosen(["table"])


def test_the_command_ends_with_what_fell(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_run, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence_run, "BENCHMARKS", (DEMO,))
    record(tmp_path / "quick" / "demo.json", speedup=4.0)
    monkeypatch.setattr(evidence_run, "start", Runs({"speedup": 1.0}, {"speedup": 1.0}))
    with pytest.raises(SlipstreamError, match=r"worse than recorded: demo\.speedup"):
        evidence_run.main(checking=True)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda one: one.name)
def test_every_recorded_benchmark_has_its_code_and_its_protocol(benchmark):
    for path in (*benchmark.sources, benchmark.protocol):
        assert (evidence_run.ROOT / path).exists(), path
    text = (evidence_run.ROOT / benchmark.protocol).read_text()
    assert text.startswith("# ") and "**Question" in text
    assert [held.name for held in benchmark.held if f"`{held.name}`" not in text] == []


def test_every_recorded_result_belongs_to_a_benchmark():
    known = {benchmark.name for benchmark in BENCHMARKS}
    recorded = {path.stem for path in evidence_run.RESULTS.glob("*.json")}
    assert {name for name in recorded if "first_rule" not in name} <= known


def test_what_takes_hours_runs_only_when_it_is_named():
    assert "arena" not in [one.name for one in evidence_run.chosen([])]
    assert [one.name for one in evidence_run.chosen(["arena"])] == ["arena"]
