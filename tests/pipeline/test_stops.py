"""However a pipeline ends, it ends soon, leaves no thread, and the tables hold every finished step."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest

from slipstream.errors import SlipstreamError
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import SCHEDULES, make_schedule
from slipstream.pipeline.trace import Trace
from slipstream.tables.exchange import Exchange
from slipstream.tables.row_optimizers import DenseAdamW
from tests.support.pipeline_problem import (
    OPTIMIZERS,
    Problem,
    SmallWork,
    differences,
    make_tables,
    outcome,
    plain_outcome,
    stale_loop,
)

PROBLEM = Problem(steps=30, samples=4)
FAILING_STEP = 7


def lanes_left():
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("slipstream-")
    ]


def start(name, problem=PROBLEM, **options):
    work, tables = SmallWork(problem), make_tables(problem, OPTIMIZERS["adam"])
    return (
        work,
        tables,
        Pipeline(
            make_schedule(name, micro_batches=2),
            work,
            tables,
            LaneGroups(Exchange(tables)),
            **options,
        ),
    )


class Failed(Exception):
    pass


STAGES = [
    (name, stage.name)
    for name in ("nested", "semi_async", "six_stage", "serial")
    for stage in SCHEDULES[name].stages
]


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_an_error_in_any_stage_reaches_the_caller(name, stage, monkeypatch):
    real = getattr(Pipeline, f"_{stage}")

    def failing(self, step, micro):
        if step == FAILING_STEP:
            raise Failed(stage)
        return real(self, step, micro)

    monkeypatch.setattr(Pipeline, f"_{stage}", failing)
    work, tables, pipeline = start(name)
    began, done = time.monotonic(), -1
    with pytest.raises(Failed, match=stage), pipeline:
        for each in pipeline.steps():
            done = each.step
    assert time.monotonic() - began < 10 and not lanes_left()
    if stage not in (
        "write",
        "update",
    ):  # a failed update or write-back is the one thing that cannot be finished
        rows = {
            key: value
            for key, value in outcome(work, tables).items()
            if key.startswith(("item", "user"))
        }
        if SCHEDULES[name].staleness == 0:
            expected = plain_outcome(replace(PROBLEM, steps=done + 1), OPTIMIZERS["adam"], 2)
            updated = work.optimizer.state and done + 1
            late = plain_outcome(replace(PROBLEM, steps=done + 2), OPTIMIZERS["adam"], 2)
            assert updated and any(
                not differences(rows, {key: value[key] for key in rows})
                for value in (expected, late)
            )


@pytest.mark.parametrize("last", (11, 28))  # at 28 the loader has seen the end of the data already
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_caller_that_stops_finds_every_finished_step_in_the_tables(name, last):
    work, tables, pipeline = start(name)
    with pipeline:
        for done in pipeline.steps():
            if done.step == last:
                break
    assert not lanes_left()
    expected = stale_loop(
        replace(PROBLEM, steps=last + 1), OPTIMIZERS["adam"], SCHEDULES[name].staleness, 2
    )
    assert not differences(outcome(work, tables), expected)


@pytest.mark.parametrize("name", ("nested", "dual_buffer"))
def test_settled_tables_hold_every_update_so_far_and_training_goes_on(name):
    work, tables, pipeline = start(name)
    with pipeline:
        for done in pipeline.steps():
            if done.step % 7 == 3:
                with pipeline.settled():
                    expected = plain_outcome(
                        replace(PROBLEM, steps=done.step + 1), OPTIMIZERS["adam"], 2
                    )
                    assert not differences(outcome(work, tables), expected)
    assert not differences(outcome(work, tables), plain_outcome(PROBLEM, OPTIMIZERS["adam"], 2))


def test_no_data_is_no_step():
    pipeline = start("nested", Problem(steps=0))[2]
    with pipeline:
        assert [done.step for done in pipeline.steps()] == []
    assert not lanes_left()


def test_a_pipeline_that_never_ran_closes():
    with start("nested")[2]:
        pass
    assert not lanes_left()


def test_asking_to_stop_finishes_what_is_routed():
    work, tables, pipeline = start("nested")
    with pipeline:
        for done in pipeline.steps():
            last = done.step
            if done.step == 5:
                pipeline.ask_to_stop()
    assert 5 <= last <= 9 and not lanes_left()
    assert not differences(
        outcome(work, tables),
        plain_outcome(replace(PROBLEM, steps=last + 1), OPTIMIZERS["adam"], 2),
    )


def test_a_trace_remembers_only_the_newest_steps():
    trace = Trace(limit=5)
    with start("nested", trace=trace)[2] as pipeline:
        for _ in pipeline.steps():
            pass
    assert {interval.step for interval in trace.intervals()} <= set(range(18, 31))


def test_what_a_schedule_would_change_silently_is_refused():
    tables = make_tables(PROBLEM, OPTIMIZERS["adam"])
    mixing = SmallWork(PROBLEM, mixes_samples="loss 'in_batch'")
    with pytest.raises(
        SlipstreamError, match=r"loss 'in_batch' mixes its samples.*use schedule=dual_buffer"
    ):
        Pipeline(make_schedule("nested"), mixing, tables, LaneGroups(Exchange(tables)))
    Pipeline(make_schedule("dual_buffer"), mixing, tables, LaneGroups(Exchange(tables)))
    dense = make_tables(PROBLEM, DenseAdamW())
    with pytest.raises(
        SlipstreamError,
        match=r"updates rows that no batch touched; use tables.optimizer=rowwise_adam",
    ):
        Pipeline(
            make_schedule("dual_buffer"), SmallWork(PROBLEM), dense, LaneGroups(Exchange(dense))
        )


CHILD = """
    import sys, time
    from tests.pipeline.test_stops import *

    work, tables, pipeline = start("nested", Problem(steps=10**6, samples=4))
    try:
        with pipeline:
            for done in pipeline.steps():
                if done.step == 5:
                    print("running", flush=True)
    except KeyboardInterrupt:
        steps = done.step + 1
        same = [not differences(
            {k: v for k, v in outcome(work, tables).items() if k.startswith("item")},
            {k: v for k, v in plain_outcome(Problem(steps=n, samples=4), OPTIMIZERS["adam"], 2).items() if k.startswith("item")},
        ) for n in (steps, steps + 1)]
        print("interrupted", any(same), lanes_left(), flush=True)
"""


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_ends_it_within_seconds(number):
    handler = (
        "import signal; signal.signal(signal.SIGTERM, lambda *a: "
        "signal.raise_signal(signal.SIGINT))\n"
    )
    paths = os.environ["PYTHONPATH"]
    command = [sys.executable, "-c", handler + textwrap.dedent(CHILD)]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout.readline() == "running\n"
        began = time.monotonic()
        child.send_signal(number)
        said, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert said == "interrupted True []\n"
    assert time.monotonic() - began < 30  # most of it the oracle's own steps
