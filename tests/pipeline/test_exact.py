"""Every schedule of staleness 0 gives the bits of the plain loop; stale ones those of the
hand-written stale loop.
"""

from functools import cache

import pytest
import torch

from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.exchange import Exchange
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

LONG = Problem(steps=200)


@cache
def long_plain(micro_batches, optimizer="adam"):
    return plain_outcome(LONG, OPTIMIZERS[optimizer], micro_batches)


def pipelined(schedule, problem, optimizer, tables=None, **options):
    work, tables = SmallWork(problem), tables or make_tables(problem, optimizer)
    with Pipeline(schedule, work, tables, LaneGroups(Exchange(tables)), **options) as pipeline:
        steps = [done.step for done in pipeline.steps()]
    assert steps == list(range(problem.steps))
    return outcome(work, tables)


@pytest.mark.parametrize("micro_batches", (1, 2, 4, 8))
@pytest.mark.parametrize("name", ("serial", "dual_buffer", "frozen_window", "nested"))
def test_a_schedule_without_staleness_equals_the_plain_loop_bit_for_bit(name, micro_batches):
    found = pipelined(make_schedule(name, micro_batches=micro_batches), LONG, OPTIMIZERS["adam"])
    assert not differences(found, long_plain(micro_batches))


@pytest.mark.parametrize("name", ("dual_buffer", "nested"))
def test_another_rule_too(name):
    assert not differences(
        pipelined(make_schedule(name, micro_batches=2), LONG, OPTIMIZERS["adagrad"]),
        long_plain(2, "adagrad"),
    )


def test_cutting_changes_nothing_but_rounding():
    wide = Problem(steps=100, dtype=torch.float64)
    whole = plain_outcome(wide, OPTIMIZERS["adagrad"], 1)
    cut = pipelined(make_schedule("nested", micro_batches=8), wide, OPTIMIZERS["adagrad"])
    assert 0 < max(differences(cut, whole).values()) < 1e-9


@pytest.mark.parametrize(("name", "micro_batches"), (("serial", 1), ("nested", 4)))
def test_a_lane_to_a_device_changes_nothing(name, micro_batches):
    problem, tables = Problem(steps=40), make_tables(Problem(steps=40), OPTIMIZERS["adam"])
    work = SmallWork(problem, has_device=True)
    with Pipeline(
        make_schedule(name, micro_batches=micro_batches), work, tables, LaneGroups(Exchange(tables))
    ) as pipeline:
        assert len(list(pipeline.steps())) == problem.steps
    assert work.transferred == problem.steps * micro_batches
    assert not differences(
        outcome(work, tables), plain_outcome(problem, OPTIMIZERS["adam"], micro_batches)
    )


def test_the_comparison_can_fail():
    assert differences(
        plain_outcome(Problem(steps=39), OPTIMIZERS["adam"]),
        plain_outcome(Problem(steps=40), OPTIMIZERS["adam"]),
    )


@pytest.mark.parametrize("buffers_ahead", (2, 3))
def test_more_prefetch_buffers_change_nothing(buffers_ahead):
    problem = Problem(steps=60)
    schedule = make_schedule("nested", micro_batches=2, buffers_ahead=buffers_ahead)
    assert not differences(
        pipelined(schedule, problem, OPTIMIZERS["adam"]),
        plain_outcome(problem, OPTIMIZERS["adam"], 2),
    )


STALE = [
    ("semi_async", 1),
    ("semi_async", 2),
    ("semi_async", 4),
    ("six_stage", 1),
    ("six_stage", 3),
]


@pytest.mark.parametrize("micro_batches", (1, 2))
@pytest.mark.parametrize(("name", "staleness"), STALE)
def test_a_stale_schedule_equals_the_stale_loop_bit_for_bit(name, staleness, micro_batches):
    problem = Problem(steps=40)
    found = pipelined(
        make_schedule(name, staleness=staleness, micro_batches=micro_batches),
        problem,
        OPTIMIZERS["adam"],
    )
    assert not differences(found, stale_loop(problem, OPTIMIZERS["adam"], staleness, micro_batches))
    assert differences(
        found, stale_loop(problem, OPTIMIZERS["adam"], staleness - 1, micro_batches)
    ), "staleness makes no difference here"


@pytest.mark.parametrize(("name", "staleness"), STALE)
@pytest.mark.parametrize("synchronous_steps", (7, 29, 50))
def test_staleness_begins_after_the_synchronous_steps(name, staleness, synchronous_steps):
    problem = Problem(steps=30)
    schedule = make_schedule(name, staleness=staleness, synchronous_steps=synchronous_steps)
    found = pipelined(schedule, problem, OPTIMIZERS["adam"])
    assert not differences(
        found, stale_loop(problem, OPTIMIZERS["adam"], staleness, 1, synchronous_steps)
    )
    if synchronous_steps == 7:
        assert differences(found, stale_loop(problem, OPTIMIZERS["adam"], staleness, 1, 8))
    if synchronous_steps >= 29:  # the first stale step has nothing to miss
        assert not differences(found, plain_outcome(problem, OPTIMIZERS["adam"]))


@pytest.mark.parametrize(("name", "staleness"), STALE)
def test_a_stale_run_that_was_stopped_goes_on_bit_for_bit(name, staleness):
    problem = Problem(steps=40)
    schedule = make_schedule(name, staleness=staleness, synchronous_steps=9)
    work, tables, stale_rows, first = (
        SmallWork(problem),
        make_tables(problem, OPTIMIZERS["adam"]),
        {},
        0,
    )
    for stop in (
        5,
        9,
        11,
        12,
        13,
        30,
        40,
    ):  # in the warm-up, at its end, again before the staleness is full, and later
        work.taken = first
        with Pipeline(
            schedule,
            work,
            tables,
            LaneGroups(Exchange(tables)),
            first_step=first,
            stale_rows=stale_rows,
        ) as pipeline:
            for done in pipeline.steps():
                if done.step == stop - 1:
                    with pipeline.settled():
                        stale_rows = pipeline.stale_rows()
                    break
        first = stop
    expected = stale_loop(problem, OPTIMIZERS["adam"], staleness, 1, 9)
    assert not differences(outcome(work, tables), expected)


def test_what_a_stopped_run_must_remember_matters():
    problem = Problem(steps=20)
    work, tables, first = SmallWork(problem), make_tables(problem, OPTIMIZERS["adam"]), 0
    for stop in (10, 20):
        work.taken = first
        with Pipeline(
            make_schedule("semi_async"),
            work,
            tables,
            LaneGroups(Exchange(tables)),
            first_step=first,
        ) as pipeline:
            for done in pipeline.steps():
                if done.step == stop - 1:
                    break
        first = stop
    assert differences(outcome(work, tables), stale_loop(problem, OPTIMIZERS["adam"], 1))
