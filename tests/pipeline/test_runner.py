"""A pipeline trains by the bits of the plain loop; a stale one by those of the stale loop."""

import contextlib
import threading
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.exchange import Exchange
from slipstream.tables.factory import make_table
from slipstream.tables.memory_table import MemoryTable
from tests.support.pipeline_problem import (
    DIM,
    OPTIMIZERS,
    Problem,
    SmallWork,
    differences,
    lanes_left,
    make_tables,
    outcome,
    pipelined,
    plain_outcome,
    stale_loop,
    start_pipeline,
    tables_of,
)

LONG = Problem(steps=200)
PROBLEM = Problem(steps=30, samples=4)


@cache
def plain(problem, micro_batches, optimizer="adam"):
    return plain_outcome(problem, OPTIMIZERS[optimizer], micro_batches)


EXACT = ("serial", "dual_buffer", "frozen_window", "nested")


@pytest.mark.parametrize("micro_batches", (1, 2, 4, 8))
@pytest.mark.parametrize("name", EXACT)
def test_a_schedule_without_staleness_equals_the_plain_loop_bit_for_bit(name, micro_batches):
    schedule = make_schedule(name, micro_batches=micro_batches)
    found = pipelined(schedule, PROBLEM, OPTIMIZERS["adam"])
    assert not differences(found, plain(PROBLEM, micro_batches))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", (1, 2, 4, 8))
@pytest.mark.parametrize("name", EXACT)
def test_after_many_steps_the_bits_are_still_those_of_the_plain_loop(name, micro_batches):
    schedule = make_schedule(name, micro_batches=micro_batches)
    assert not differences(
        pipelined(schedule, LONG, OPTIMIZERS["adam"]), plain(LONG, micro_batches)
    )


@pytest.mark.parametrize("name", ("dual_buffer", "nested"))
def test_another_row_optimizer_gives_the_bits_of_the_plain_loop_too(name):
    schedule = make_schedule(name, micro_batches=2)
    found = pipelined(schedule, PROBLEM, OPTIMIZERS["adagrad"])
    assert not differences(found, plain(PROBLEM, 2, "adagrad"))


def test_cutting_changes_nothing_but_rounding():
    wide = Problem(steps=40, dtype=torch.float64)
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


def test_rows_of_several_steps_are_retrieved_at_a_time(tmp_path, monkeypatch):
    """Every retrieval waits for another one of the same moment, as for a far tier."""
    together, real = threading.Barrier(2), DiskTable.read

    def read(table, keys_U):
        if table.name == "user" and threading.current_thread().name == "slipstream-table":
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(5.0)
        return real(table, keys_U)

    monkeypatch.setattr(DiskTable, "read", read)
    schedule = make_schedule("nested", micro_batches=2, buffers_ahead=2)
    problem = Problem(steps=40)  # an even number, so that nobody waits alone
    tables = tables_of("disk", tmp_path)
    found = pipelined(schedule, problem, OPTIMIZERS["adam"], tables)
    assert not together.broken
    assert not differences(found, plain_outcome(problem, OPTIMIZERS["adam"], 2))


def test_a_table_that_marks_what_it_reads_is_read_by_one_thread_at_a_time(monkeypatch):
    inside, most, real = [], [], MemoryTable.read

    def read(table, keys_U):
        inside.append(table.name)
        most.append(len(inside))
        time.sleep(1e-3)
        inside.remove(table.name)
        return real(table, keys_U)

    monkeypatch.setattr(MemoryTable, "read", read)
    schedule = make_schedule("nested", micro_batches=2, buffers_ahead=3)
    pipelined(schedule, Problem(steps=20), OPTIMIZERS["adam"])
    assert max(most) == 1


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


@pytest.mark.parametrize("name", ("nested", "dual_buffer"))
def test_settled_tables_hold_every_update_so_far_and_training_goes_on(name):
    work, tables, pipeline = start_pipeline(name, PROBLEM)
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
    pipeline = start_pipeline("nested", Problem(steps=0))[2]
    with pipeline:
        assert [done.step for done in pipeline.steps()] == []
    assert not lanes_left()


def test_a_pipeline_that_never_ran_closes():
    with start_pipeline("nested", PROBLEM)[2]:
        pass
    assert not lanes_left()


def test_asking_to_stop_finishes_what_is_routed():
    work, tables, pipeline = start_pipeline("nested", PROBLEM)
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


ON_TIERS = Problem(steps=40)


@pytest.mark.parametrize("tier", ("memory", "disk", "hashed", "hashed on disk"))
@pytest.mark.parametrize("schedule", ("nested", "frozen_window"))
def test_every_tier_ends_with_the_bits_of_the_plain_loop(tier, schedule, tmp_path):
    directory = tmp_path if "disk" in tier else None
    tables, work = tables_of(tier.split()[0], directory), SmallWork(ON_TIERS)
    with Pipeline(
        make_schedule(schedule, micro_batches=2), work, tables, LaneGroups(Exchange(tables))
    ) as pipeline:
        assert sum(1 for _ in pipeline.steps()) == ON_TIERS.steps
    expected = plain_outcome(ON_TIERS, OPTIMIZERS["adam"], 2)
    assert not differences(outcome(work, tables), expected)
    for table in tables.values():
        table.close()
    if tier == "disk":
        opened = tables_of("disk", tmp_path)
        assert not differences(outcome(work, opened), expected)


def test_ids_beyond_any_float_keep_their_rows():
    big = 2**63 - 1
    table = make_table("hashed", "item", None, DIM, OPTIMIZERS["adam"], seed=1)
    before = table.read(torch.tensor([big - 1, big])).weights_UD.clone()
    assert not torch.equal(before[0], before[1])
