"""The same bits on two and four real ranks, with shards and replicas; and no rank waits for one
that failed.
"""

import threading

import pytest
import torch
import torch.distributed as dist

from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Exchange
from slipstream.tables.replicas import SummedGradients
from tests.support.pipeline_problem import (
    OPTIMIZERS,
    Problem,
    SmallWork,
    Together,
    differences,
    make_tables,
    older_rows,
    outcome,
    plain_loop,
)
from tests.support.ranks_fixtures import run_ranks

SECONDS = 600  # how long ranks may take on a busy machine; time is not what these tests are about
pytestmark = pytest.mark.timeout(SECONDS + 60)


TWO_SHARDS = [
    ["dual_buffer", 1],
    *(["serial", 2], ["frozen_window", 2], ["nested", 2]),
    *(["nested", 4], ["nested", 8]),
]


def groups_of(rank, world, replicas):
    """(shard group, replica group) of this rank."""
    places = torch.arange(world).view(replicas, world // replicas)
    made = [
        [(dist.new_group(row), row) for row in members.tolist()] for members in (places, places.T)
    ]
    return tuple(next(group for group, row in each if rank in row) for each in made)


def problem_of(rank, steps):
    return Problem(
        steps=steps - 3 * (rank == 1), samples=6, rank=rank
    )  # rank 1 runs out of data first


def check_equal(rank, world, replicas, cases, steps):
    shards = world // replicas
    shard_group, replica_group = groups_of(rank, world, replicas)
    problem, found = problem_of(rank, steps), {}
    for micro_batches in sorted({micro for _, micro in cases}):
        tables = make_tables(problem, OPTIMIZERS["adam"], world=shards, rank=rank % shards)
        exchange = Exchange(tables, shard_group if shards > 1 else None)
        copies = SummedGradients(Communicator(replica_group)) if replicas > 1 else None
        together = Together(exchange, Communicator(dist.new_group(list(range(world)))), copies)
        longer = Problem(steps=steps, samples=6, rank=rank)
        longer_work = plain_loop(
            longer, OPTIMIZERS["adam"], micro_batches, tables, together, data_steps=problem.steps
        )[0]
        expected = outcome(longer_work, tables, shards, rank % shards)
        for name in [name for name, micro in cases if micro == micro_batches]:
            work, tables = (
                SmallWork(problem),
                make_tables(problem, OPTIMIZERS["adam"], world=shards, rank=rank % shards),
            )
            groups = LaneGroups(
                Exchange(tables, shard_group if shards > 1 else None),
                world=world,
                replicas=replicas,
            )
            with Pipeline(
                make_schedule(name, micro_batches=micro_batches), work, tables, groups
            ) as pipeline:
                counts = [done.count for done in pipeline.steps()]
            groups.close()
            assert len(counts) == steps and counts[0] == 6 * world and counts[-1] == 6 * (world - 1)
            found[f"{name} {micro_batches}"] = differences(
                outcome(work, tables, shards, rank % shards), expected
            )
    return found


@pytest.mark.parametrize(
    ("world", "replicas", "cases", "steps"),
    [
        (2, 1, TWO_SHARDS, 40),
        pytest.param(2, 1, TWO_SHARDS, 200, marks=pytest.mark.slow),
        (2, 2, [["nested", 2]], 30),
        pytest.param(4, 1, [["nested", 2], ["dual_buffer", 1]], 24, marks=pytest.mark.slow),
        pytest.param(4, 2, [["nested", 2], ["frozen_window", 2]], 24, marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_the_bits_of_the_plain_loop(world, replicas, cases, steps, tmp_path):
    answers = run_ranks(
        world,
        f"{__name__}:check_equal",
        tmp_path,
        replicas=replicas,
        cases=cases,
        steps=steps,
        seconds=SECONDS,
    )
    assert answers == [{f"{name} {micro}": {} for name, micro in cases}] * world


def check_stale(rank, world, replicas, cases, steps):
    """Stale schedules against the stale loop, cases (schedule, staleness, synchronous steps,
    micro-batches).
    """
    shards, problem, found = world // replicas, problem_of(rank, steps), {}
    shard_group, replica_group = groups_of(rank, world, replicas)
    longer, everybody = (
        Problem(steps=steps, samples=6, rank=rank),
        Communicator(dist.new_group(list(range(world)))),
    )
    for name, staleness, synchronous_steps, micro_batches in cases:
        tables = make_tables(problem, OPTIMIZERS["adam"], world=shards, rank=rank % shards)
        copies = SummedGradients(Communicator(replica_group)) if replicas > 1 else None
        together = Together(
            Exchange(tables, shard_group if shards > 1 else None), everybody, copies
        )
        read_rows = older_rows(staleness, synchronous_steps, shards, rank % shards)
        work = plain_loop(
            longer, OPTIMIZERS["adam"], micro_batches, tables, together, problem.steps, read_rows
        )[0]
        expected = outcome(work, tables, shards, rank % shards)
        work, tables = (
            SmallWork(problem),
            make_tables(problem, OPTIMIZERS["adam"], world=shards, rank=rank % shards),
        )
        groups = LaneGroups(
            Exchange(tables, shard_group if shards > 1 else None), world=world, replicas=replicas
        )
        schedule = make_schedule(
            name,
            staleness=staleness,
            synchronous_steps=synchronous_steps,
            micro_batches=micro_batches,
        )
        with Pipeline(schedule, work, tables, groups) as pipeline:
            assert sum(1 for _ in pipeline.steps()) == steps
        groups.close()
        found[f"{name} {staleness}"] = differences(
            outcome(work, tables, shards, rank % shards), expected
        )
    return found


@pytest.mark.parametrize(
    ("world", "replicas", "cases"),
    [
        (
            2,
            1,
            [
                ["semi_async", 1, 0, 1],
                ["semi_async", 2, 5, 2],
                ["semi_async", 4, 0, 1],
                ["six_stage", 1, 7, 1],
            ],
        ),
        (2, 2, [["six_stage", 1, 0, 2], ["semi_async", 2, 0, 1]]),
    ],
)
def test_ranks_end_with_the_bits_of_the_stale_loop(world, replicas, cases, tmp_path):
    answers = run_ranks(
        world,
        f"{__name__}:check_stale",
        tmp_path,
        replicas=replicas,
        cases=cases,
        steps=40,
        seconds=SECONDS,
    )
    assert answers == [{f"{name} {staleness}": {} for name, staleness, *_ in cases}] * world


def stop_at(rank, world, how):
    """Rank 1 fails (or all stop) in the middle; return how each rank came back."""
    problem = Problem(steps=10_000, samples=4, rank=rank)
    tables = make_tables(problem, OPTIMIZERS["adam"], world=world, rank=rank)
    work = SmallWork(problem, fails=("loss", 20) if how == "error" and rank == 1 else None)
    groups = LaneGroups(Exchange(tables, dist.new_group(list(range(world)))), world=world)
    ended, steps = "nothing", 0
    try:
        with Pipeline(make_schedule("nested", micro_batches=2), work, tables, groups) as pipeline:
            for done in pipeline.steps():
                steps = done.step
                if how == "break" and done.step == 20:
                    break
                if how == "ask" and done.step == 20 and rank == 0:
                    pipeline.ask_to_stop()
    except (ArithmeticError, RuntimeError) as error:
        ended = type(error).__name__
    left = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("slipstream-")
    ]
    tables_hold_rows = all(
        table.read(torch.arange(0)).weights_UD.numel() == 0 for table in tables.values()
    )
    return {
        "ended": ended,
        "left": left,
        "steps": steps,
        "readable": tables_hold_rows,
    }


@pytest.mark.parametrize("how", ("error", "break", "ask"))
def test_no_rank_waits_for_one_that_stops(how, tmp_path):
    answers = run_ranks(2, f"{__name__}:stop_at", tmp_path, how=how, seconds=SECONDS)
    assert all(not answer["left"] for answer in answers), answers
    if how == "error":
        assert [answer["ended"] for answer in answers] == ["RuntimeError", "ArithmeticError"]
    else:
        assert [answer["ended"] for answer in answers] == ["nothing"] * 2
        assert answers[0]["steps"] == answers[1]["steps"]
