"""However a pipeline ends, it leaves no thread, and the tables hold every finished step."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest

from slipstream.pipeline.executor import Executor
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import NESTED, SCHEDULES, TABLES, After, Lane, make_schedule
from tests.support.pipeline_problem import (
    OPTIMIZERS,
    Problem,
    differences,
    lanes_left,
    outcome,
    pipelined,
    plain_outcome,
    seeded_delays,
    stale_loop,
    start_pipeline,
)

PROBLEM = Problem(steps=30, samples=4)
FAILING_STEP = 7


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
    work, tables, pipeline = start_pipeline(name, PROBLEM)
    done = -1
    with pytest.raises(Failed, match=stage), pipeline:
        for each in pipeline.steps():
            done = each.step
    assert not lanes_left()
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
    work, tables, pipeline = start_pipeline(name, PROBLEM)
    with pipeline:
        for done in pipeline.steps():
            if done.step == last:
                break
    assert not lanes_left()
    expected = stale_loop(
        replace(PROBLEM, steps=last + 1), OPTIMIZERS["adam"], SCHEDULES[name].staleness, 2
    )
    assert not differences(outcome(work, tables), expected)


CHILD = """
    import sys, time
    from tests.pipeline.test_executor import *

    def expected(steps):
        return plain_outcome(Problem(steps=steps, samples=4), OPTIMIZERS["adam"], 2)

    # A delay of every task keeps the steps few that `expected` repeats, however late the signal.
    slowly = {"delay": lambda task: 0.005}
    work, tables, pipeline = start_pipeline("nested", Problem(steps=10**6, samples=4), **slowly)
    try:
        with pipeline:
            for done in pipeline.steps():
                if done.step == 5:
                    print("running", flush=True)
    except KeyboardInterrupt:
        steps = done.step + 1
        same = [not differences(
            {k: v for k, v in outcome(work, tables).items() if k.startswith("item")},
            {k: v for k, v in expected(n).items() if k.startswith("item")},
        ) for n in (steps, steps + 1)]
        print("interrupted", any(same), lanes_left(), flush=True)
"""


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.system
def test_a_signal_ends_it_and_leaves_no_thread(number):
    # A shell's background job ignores SIGINT, and so would its children: both are set here.
    handler = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, lambda *a: signal.raise_signal(signal.SIGINT))\n"
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
        child.send_signal(number)
        said, _ = child.communicate(timeout=240)  # only against hanging
    finally:
        child.kill()
    assert said == "interrupted True []\n"


def test_a_schedule_that_breaks_its_promise_is_refused():
    # Writes on a lane of their own, so that no order of the table lane helps.
    stages = tuple(
        replace(each, lane=Lane.LOADER)
        if each.name == "write"
        else replace(each, after=(After("place"),))
        if each.name == "retrieve"
        else each
        for each in NESTED.stages
    )
    with pytest.raises(ValueError, match="does not keep its promise: retrieval does not wait"):
        Executor(replace(NESTED, stages=stages), {})


SHORT = Problem(steps=12, samples=4, length=3)


NAMES = ("dual_buffer", "frozen_window", "nested")


def check_interleavings(name, seeds):
    problem = replace(SHORT, steps=6)
    expected = {micros: plain_outcome(problem, OPTIMIZERS["adam"], micros) for micros in (1, 2)}
    for seed in seeds:
        numbers = {"buffers_ahead": 2} if name == "nested" and seed % 3 == 0 else {}
        schedule = make_schedule(name, micro_batches=1 + seed % 2, **numbers)
        found = pipelined(schedule, problem, OPTIMIZERS["adam"], delay=seeded_delays(seed))
        assert not differences(found, expected[schedule.micro_batches]), seed


@pytest.mark.parametrize("name", NAMES)
def test_interleavings_change_nothing(name):
    check_interleavings(name, range(6))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_500_interleavings_change_nothing(name):
    check_interleavings(name, range(167))


@pytest.mark.parametrize("name", ("semi_async", "six_stage"))
def test_interleavings_change_nothing_in_stale_schedules(name):
    problem = replace(SHORT, steps=8)
    expected = {
        staleness: stale_loop(problem, OPTIMIZERS["adam"], staleness, 2) for staleness in (1, 2)
    }
    for seed in range(6):
        schedule = make_schedule(name, micro_batches=2, staleness=1 + seed % 2)
        found = pipelined(schedule, problem, OPTIMIZERS["adam"], delay=seeded_delays(seed))
        assert not differences(found, expected[schedule.staleness]), seed


def test_a_schedule_with_a_stage_that_has_no_action_is_refused():
    with pytest.raises(ValueError, match=r"stages without action: \['route'"):
        Executor(NESTED, {"load": lambda step, micro: 1})


@pytest.mark.parametrize("name", ("nested", "dual_buffer"))
def test_rows_are_written_back_while_the_next_are_retrieved(name):
    written = threading.Event()

    def retrieve(step, micro):
        if step == 2 and not written.wait(20):
            raise TimeoutError("the write-back of step 1 waits for the retrieval of step 2")

    def load(step, micro):
        if step == 4:
            executor.end(step)
        return 1

    actions = {stage.name: lambda step, micro: None for stage in SCHEDULES[name].stages}
    actions |= {"load": load, "retrieve": retrieve}
    actions["write"] = lambda step, micro: written.set() if step == 1 else None
    executor = Executor(make_schedule(name, micro_batches=1), actions)
    assert list(executor.steps()) == [0, 1, 2, 3]
    with executor.pause(*TABLES):  # nothing runs any more, so every lane of the tables is free
        assert not lanes_left()
