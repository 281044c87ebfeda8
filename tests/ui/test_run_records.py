"""What the page knows of runs: rows, curves, traces, slices, people."""

import json
from pathlib import Path

import pytest

from slipstream.cli.app import run_command
from slipstream.errors import SlipstreamError
from slipstream.pipeline.schedule import Lane
from slipstream.pipeline.trace import Interval, write_trace
from slipstream.serving.request_errors import BadRequest
from slipstream.ui.run_records import LENGTH, MOST_POINTS, RunRecords, curves, slices, thinned
from tests.support.tiny_runs import prepare_store, train_tiny, write_log


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained and evaluated run with a trace of two steps."""
    place = tmp_path_factory.mktemp("page")
    write_log(place / "log.csv")
    prepare_store(place)
    train_tiny(place, "log_every=1")
    assert run_command(["evaluate", str(place / "run")]) == 0
    intervals = [
        Interval(Lane.COMPUTE, "update", 0, 0, 0.0, 0.0, 1.0, True, None),
        Interval(Lane.TABLE, "retrieve", 1, 0, 1.0, 1.0, 1.5, True, None),
        Interval(Lane.COMPUTE, "update", 1, 0, 1.2, 1.5, 2.0, True, ("retrieve", 1, 0)),
    ]
    write_trace(place / "run" / "trace.json", intervals, {"run": "tiny", "schedule": "nested"})
    return place


def test_a_run_is_named_from_the_directory_and_told_with_its_figures(workplace: Path):
    [row] = RunRecords(workplace).runs().runs
    assert (row.run, row.data, row.status) == ("run", "store", "finished")
    assert row.step > 0 and row.tokens_per_second > 0 and row.trace and row.slices
    assert "HR@10" in row.test and row.model == "hstu 8 1"
    assert RunRecords(workplace / "run").runs().runs[0].run == "."


def test_curves_recipe_and_slices_come_with_one_run(workplace: Path):
    found = RunRecords(workplace).run("run")
    assert found.recipe_keys["model.dim"] == "8" and found.recipe_keys["train.epochs"] == "2"
    assert found.curves["loss"] and found.curves["validation HR@10"]
    assert {each.by for each in found.slices} == {"history length", "target popularity"}
    assert all("HR@10" in each.figures and each.users for each in found.slices)
    json.dumps(found.recipe_keys)


def test_the_last_step_of_a_trace_begins_at_zero(workplace: Path):
    found = RunRecords(workplace).trace("run", 1)
    assert (found.schedule, found.lanes) == ("nested", ["table", "compute"])
    assert [(each.stage, each.begin_ms, each.end_ms) for each in found.blocks] == [
        ("retrieve", 0.0, 500.0),
        ("update", 500.0, 1000.0),
    ]
    waited = found.blocks[1]
    assert waited.waited_ms == pytest.approx(300.0)
    assert waited.waited_for == "retrieve of step 1, micro-batch 0"
    assert found.span_ms == 1000.0 and found.step_ms == pytest.approx(1000.0)


def test_people_of_a_slice_have_as_many_behaviours_as_it_says(workplace: Path):
    records = RunRecords(workplace)
    for each in records.run("run").slices:
        if each.by == LENGTH:
            found = records.people("run", each.by, each.least, each.most, 200)
            assert len(found.users) == each.users
            assert all(each.least <= count <= each.most for count in found.behaviours)
    assert len(records.people("run", LENGTH, 0, 10**6, 3).users) == 3
    with pytest.raises(BadRequest, match="slices are by"):
        records.people("run", "colour", 0, 1, 3)


@pytest.mark.parametrize("name", ["../run", "/etc", "nobody", ""])
def test_only_runs_that_are_listed_are_read(workplace: Path, name: str):
    with pytest.raises(SlipstreamError, match="no run is called"):
        RunRecords(workplace).run(name)


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path: Path, workplace: Path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text((workplace / "run" / "run.json").read_text())
    with pytest.raises(BadRequest, match=r"train\.schedule=nested"):
        RunRecords(tmp_path).trace("bare", 1)
    [row] = RunRecords(tmp_path).runs().runs
    assert row.tokens_per_second is None and not row.trace


def test_curves_leave_out_what_is_no_number_and_long_ones_are_thinned():
    records = [
        {"step": 1, "loss": 2.0, "note": "x", "lr": float("nan")},
        {"step": 2, "validation": {"HR@10": 0.5}, "best": True},
    ]
    assert curves(records) == {"loss": [[1.0, 2.0]], "validation HR@10": [[2.0, 0.5]]}
    points = [[float(step), 0.0] for step in range(5 * MOST_POINTS)]
    assert len(thinned(points)) == MOST_POINTS and thinned(points)[-1] == points[-1]
    assert slices([]) == []
