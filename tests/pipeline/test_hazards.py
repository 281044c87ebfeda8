"""The promises of schedules: proved from their order, and broken visibly without a part of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.pipeline import hazards
from slipstream.pipeline.buffers import RowBuffer
from slipstream.pipeline.hazards import Sources, copied_from, problems, sources
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import (
    NESTED,
    SCHEDULES,
    SEMI_ASYNC,
    SIX_STAGE,
    After,
    Lane,
    make_schedule,
    with_device,
)
from tests.support.pipeline_problem import (
    OPTIMIZERS,
    Problem,
    differences,
    pipelined,
    plain_outcome,
    seeded_delays,
    stale_loop,
)

SHORT = Problem(steps=12, samples=4, length=3)


def without(schedule, stage, *stages):
    """The schedule whose stage no longer waits for these."""
    kept = tuple(after for after in schedule[stage].after if after.stage not in stages)
    return replace(
        schedule,
        stages=tuple(
            replace(each, after=kept) if each.name == stage else each for each in schedule.stages
        ),
    )


def early(schedule, stage):
    return replace(
        schedule,
        stages=tuple(
            replace(each, ahead=1) if each.name == stage else each for each in schedule.stages
        ),
    )


def on_lane(schedule, stage, lane):
    return replace(
        schedule,
        stages=tuple(
            replace(each, lane=lane) if each.name == stage else each for each in schedule.stages
        ),
    )


# Writes on a lane of their own, so that no order of the table lane helps.
UNORDERED = without(on_lane(NESTED, "write", Lane.LOADER), "retrieve", "write")


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda schedule: schedule.name)
def test_shipped_schedules_keep_their_promise(schedule):
    assert not problems(schedule)
    assert not problems(with_device(schedule))


@pytest.mark.parametrize("ahead", (1, 2, 3))
def test_every_number_of_buffers_keeps_the_promise(ahead):
    assert not problems(make_schedule("nested", buffers_ahead=ahead))
    assert not problems(make_schedule("semi_async", staleness=ahead))
    assert not problems(make_schedule("six_stage", staleness=ahead))


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (UNORDERED, "retrieval does not wait for the write-back of 2 steps earlier"),
        (
            early(without(NESTED, "synchronise", "update"), "synchronise"),
            "rows updated 1 steps earlier are not copied before they are read",
        ),
        (
            without(NESTED, "answer", "synchronise"),
            "rows updated 1 steps earlier are not copied before they are read",
        ),
        (without(NESTED, "write", "update"), "rows are written back before they are updated"),
        (without(SEMI_ASYNC, "refresh", "answer"), "rows are copied while they are being read"),
        (
            on_lane(without(SEMI_ASYNC, "update_rows", "refresh"), "refresh", Lane.LOADER),
            "rows updated 1 steps earlier are not copied before the next update",
        ),
        (
            without(SEMI_ASYNC, "update_rows", "update"),
            "rows are updated before the step is certain",
        ),
        (
            without(on_lane(SIX_STAGE, "write", Lane.LOADER), "retrieve", "write"),
            "retrieval does not wait for the write-back of 2 steps earlier",
        ),
        (
            on_lane(SIX_STAGE, "write", Lane.LOADER),
            "retrieval may or may not see the write-back of 1 steps earlier",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_broken_order_is_named(schedule, sentence):
    assert sentence in problems(schedule)


def test_a_schedule_that_waits_for_itself_is_named():
    circular = replace(
        NESTED,
        stages=tuple(
            replace(each, after=(After("update"),)) if each.name == "answer" else each
            for each in NESTED.stages
        ),
    )
    assert "waits for itself" in problems(circular)[0]


def test_sources_name_the_newest_holder_of_every_key():
    keys = torch.tensor([1, 4, 5, 9, 12])
    found = sources(
        keys,
        {
            3: torch.tensor([0, 4, 9, 30]),
            4: torch.tensor([4, 12]),
            2: torch.tensor([], dtype=torch.int64),
        },
    )
    assert [(step, there.tolist(), here.tolist()) for step, there, here in found.copies] == [
        (4, [0, 1], [1, 4]),
        (3, [2], [3]),
    ]
    assert found.rest_R.tolist() == [0, 2]
    assert list(copied_from(make_schedule("nested", buffers_ahead=2), 7)) == [5, 6]


@pytest.mark.parametrize("seed", range(20))
def test_sources_agree_with_python_sets(seed):
    rng = np.random.default_rng(seed)

    def draw():
        return torch.from_numpy(np.unique(rng.integers(0, 40, rng.integers(0, 20))))

    keys, held = draw(), {step: draw() for step in range(3)}
    found, expected = sources(keys, held), {}
    for step in held:
        expected |= {int(key): step for key in keys if int(key) in held[step].tolist()}
    seen = {
        int(keys[h]): step
        for step, there, here in found.copies
        for t, h in zip(there, here, strict=True)
        if held[step][t] == keys[h]
    }
    assert seen == expected
    assert sorted(keys[found.rest_R].tolist()) == sorted(set(keys.tolist()) - set(expected))


def test_without_the_refresh_a_stale_result_is_wrong(monkeypatch):
    monkeypatch.setattr(Pipeline, "_refresh", lambda self, step, micro: None)
    assert differences(
        pipelined(make_schedule("semi_async"), SHORT, OPTIMIZERS["adam"]),
        stale_loop(SHORT, OPTIMIZERS["adam"], 1),
    )


def breaks(schedule, slow=None):
    found = pipelined(schedule, SHORT, OPTIMIZERS["adam"], delay=seeded_delays(1, slow))
    return differences(found, plain_outcome(SHORT, OPTIMIZERS["adam"], schedule.micro_batches))


@pytest.mark.parametrize("slow", (None, "write", "retrieve", "update"))
def test_nothing_breaks_before_the_mutations(slow):
    assert not breaks(make_schedule("nested", micro_batches=2), slow)


def test_without_the_order_of_write_backs_the_result_is_wrong(monkeypatch):
    monkeypatch.setattr(hazards, "problems", lambda schedule: ())
    assert breaks(replace(UNORDERED, micro_batches=2), "write")


def test_without_the_copy_of_state_the_result_is_wrong(monkeypatch):
    def zero_state(self, other, there, here):
        for value in self.state.values():
            value.index_fill_(0, here, 0)

    monkeypatch.setattr(RowBuffer, "copy_state", zero_state)
    assert breaks(make_schedule("nested", micro_batches=2))


def test_without_the_intersection_the_result_is_wrong(monkeypatch):
    monkeypatch.setattr(
        hazards, "sources", lambda keys, earlier: Sources([], torch.arange(keys.numel()))
    )
    assert breaks(make_schedule("nested", micro_batches=2))


def test_rows_read_on_demand_see_every_earlier_update():
    late = without(on_lane(NESTED, "write", Lane.LOADER), "retrieve", "write")
    assert any("read on demand may miss" in sentence for sentence in problems(late))
