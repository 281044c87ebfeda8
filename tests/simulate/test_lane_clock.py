"""The clock of many workers keeps the engine's order, and nothing that gets faster delays it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.pipeline import hazards
from slipstream.pipeline.executor import Executor
from slipstream.pipeline.schedule import KINDS, SCHEDULES, make_schedule
from slipstream.pipeline.trace import Trace, shares
from slipstream.simulate.lane_clock import ExchangeTime, LaneClock, TaskTime, task_order

NAMES = sorted(SCHEDULES)
EXCHANGES = ("answer", "collect", "reduce", "route")
TIMES = st.dictionaries(
    st.sampled_from([stage.name for stage in SCHEDULES["nested"].stages] + ["update_rows"]),
    st.floats(0.0, 3.0, allow_subnormal=False),
)


def times(seconds: dict[str, float], network: float):
    def of(task):
        took = seconds.get(task.stage, 0.1)
        if task.stage in EXCHANGES:
            return TaskTime(0.0, (ExchangeTime("group", took * network),))
        return TaskTime(took)

    return of


def last_end(schedule, seconds, network, workers=3, steps=5):
    return LaneClock(schedule, workers).run(steps, times(seconds, network)).ends_S[-1]


@pytest.mark.parametrize("name", NAMES)
def test_tasks_begin_after_all_that_the_engine_says_must_have_ended(name):
    schedule, steps = make_schedule(name, micro_batches=2), 6
    known = hazards.before(schedule, steps, 2)
    found = LaneClock(schedule, 4, watched=(3,)).run(steps, times({"compute": 1.0}, 0.5))
    begins = {(each.stage, each.step, each.micro): each.begin for each in found.intervals[0]}
    ends = {(each.stage, each.step, each.micro): each.end for each in found.intervals[0]}
    assert len(begins) == len(known)
    for task, earlier in known.items():
        for other in earlier:
            first = (other.stage, other.step, other.micro)
            assert ends[first] <= begins[task.stage, task.step, task.micro] + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_that_of_the_engines_lanes(name):
    schedule, steps = make_schedule(name, micro_batches=2), 5
    ran = Trace()
    actions = {stage.name: lambda step, micro: 2 for stage in schedule.stages}
    executor = Executor(schedule, actions, trace=ran)
    for step in executor.steps():
        if step == steps - 1:
            executor.end(steps)
    lanes: dict[object, list] = {}
    for each in ran.intervals():
        if each.step < steps:
            lanes.setdefault("all" if schedule.serial else each.lane, []).append(
                (each.stage, each.step, each.micro)
            )
    for thread, program in enumerate(hazards.programs(schedule, steps, 2)):
        planned = [p.task for p in task_order(schedule, steps) if p.thread == thread]
        assert planned == program
        lane = "all" if schedule.serial else schedule[program[0].stage].lane
        assert [(t.stage, t.step, t.micro) for t in planned] == lanes[lane]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), TIMES, st.floats(0.1, 4.0), st.floats(0.05, 1.0))
def test_more_bandwidth_is_never_slower(name, seconds, network, faster):
    schedule = make_schedule(name, micro_batches=3)
    slow, fast = (last_end(schedule, seconds, each) for each in (network, network * faster))
    assert fast <= slow + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), TIMES, st.sampled_from(["compute", "retrieve", "write", "update"]))
def test_a_shorter_stage_is_never_slower(name, seconds, stage):
    schedule = make_schedule(name, micro_batches=2)
    before = last_end(schedule, seconds, 1.0)
    after = last_end(schedule, seconds | {stage: seconds.get(stage, 0.1) / 2}, 1.0)
    assert after <= before + 1e-9


@pytest.mark.parametrize("name", [name for name in NAMES if name != "serial"])
def test_free_exchange_and_lookup_leave_the_compute_bound(name):
    schedule, seconds = make_schedule(name), dict.fromkeys(EXCHANGES, 0.0)
    free = seconds | {stage.name: 0.0 for stage in schedule.stages} | {"compute": 0.25}
    ends_S = LaneClock(schedule, 8).run(8, times(free, 1.0)).ends_S
    assert np.diff(ends_S)[3:] == pytest.approx(0.25 * schedule.micro_batches)


def test_one_worker_in_series_takes_the_sum_of_its_stages():
    schedule = make_schedule("serial", micro_batches=3)
    seconds = {stage.name: 0.01 * (place + 1) for place, stage in enumerate(schedule.stages)}
    whole = sum(seconds[stage.name] * (3 if stage.each else 1) for stage in schedule.stages)
    ends_S = LaneClock(schedule, 1).run(4, times(seconds, 1.0)).ends_S
    assert np.diff(ends_S) == pytest.approx(whole)


def test_nested_leaves_the_first_rows_and_the_last_gradients_exposed():
    schedule, parts = make_schedule("nested", micro_batches=8), 8
    seconds = {stage.name: 0.0 for stage in schedule.stages}
    seconds |= {"compute": 1.0, "answer": 0.3, "collect": 0.4}
    found = LaneClock(schedule, 4).run(10, times(seconds, 1.0))
    assert np.diff(found.ends_S)[4:] == pytest.approx(parts * 1.0 + 0.3 + 0.4)
    told = shares(found.intervals[0], 4, 9)
    assert told["exposed_comm"] == pytest.approx(0.7 / 8.7)


def test_exchanges_of_a_group_wait_for_its_slowest_and_not_for_other_groups():
    schedule = make_schedule("serial")
    slow_W = np.array([0.0, 0.0, 5.0, 0.0])  # worker 2 is in the second of two groups

    def of(task):
        if task.stage == "load":
            return TaskTime(slow_W)
        among = {"answer": "group", "collect": "replicas", "reduce": "everybody"}.get(task.stage)
        return TaskTime(0.0, (ExchangeTime(among, 1.0),)) if among else TaskTime()

    found = LaneClock(schedule, 2, 2, watched=range(4)).run(1, of)
    ends = {
        stage: [next(i.end for i in one if i.stage == stage) for one in found.intervals]
        for stage in ("answer", "collect", "reduce")
    }
    assert ends["answer"] == [1.0, 1.0, 6.0, 6.0]
    assert ends["collect"] == [7.0] * 4 and ends["reduce"] == [8.0] * 4


def test_a_schedule_that_breaks_its_promise_is_refused():
    from dataclasses import replace

    broken = replace(SCHEDULES["semi_async"], staleness=0)
    with pytest.raises(ValueError, match="promise"):
        LaneClock(broken, 2)


def test_every_interval_has_a_kind():
    found = LaneClock(make_schedule("nested"), 2).run(2, times({}, 1.0))
    assert {each.kind for each in found.intervals[0]} == set(KINDS.values())
