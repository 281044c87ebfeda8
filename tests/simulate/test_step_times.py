"""Phases become stages, stages become tasks, and their shares add up."""

import numpy as np
import pytest

from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import make_schedule
from slipstream.simulate.lane_clock import ExchangeTime
from slipstream.simulate.step_times import PhaseTimes, StageSeconds, StepTimes, shares_of

PHASES = PhaseTimes.model_validate(
    {"compute": 1000, "lookup": {"constant": 100, "factor": 1}, "exchange": 400, "overhead": 20}
)


def whole_step(name: str, stages, **numbers):
    schedule = make_schedule(name, **numbers)
    times = StepTimes(schedule, stages, shares_of(schedule))
    total = {}
    for stage in schedule.stages:
        parts = schedule.micro_batches if stage.each else 1
        for micro in range(parts):
            task = times(Task(stage.name, 0, micro))
            spent = task.seconds + sum(each.network + each.latency for each in task.exchanges)
            total[stage.name] = total.get(stage.name, 0.0) + spent
    return total


@pytest.mark.parametrize(("name", "parts"), [("serial", 1), ("nested", 8), ("nested", 5)])
def test_a_step_takes_its_phases_however_it_is_cut(name, parts):
    total = whole_step(name, PHASES.stages(16, 1), micro_batches=parts)
    assert total["compute"] == pytest.approx(1.0)
    lookup = sum(total[stage] for stage in ("route", "place", "retrieve", "write"))
    assert lookup == pytest.approx(0.116)
    assert total["answer"] == total["collect"] == pytest.approx(0.2)


def test_groups_divide_the_exchange_and_add_one_between_them():
    phases = PHASES.model_copy(update={"between_groups": PHASES.overhead})
    whole = whole_step("nested", phases.stages(4, 4))
    assert whole["answer"] == pytest.approx(0.05)
    assert whole["collect"] == pytest.approx(0.05 + 3 * 0.02)
    at_end = StepTimes(
        make_schedule("nested"), phases.stages(4, 4), shares_of(make_schedule("nested"))
    )
    exchanges = [len(at_end(Task("collect", 0, micro)).exchanges) for micro in range(8)]
    assert exchanges == [1] * 7 + [2]  # replicas are summed once, as the pipeline does


def test_a_worker_with_more_tokens_computes_longer():
    schedule = make_schedule("serial")
    stages = {
        "compute": StageSeconds(2.0, per_call=0.5, by_load=True),
        "answer": StageSeconds(exchanges=(ExchangeTime("group", 1.0),), by_load=True),
    }
    load_W = np.array([0.5, 1.0, 1.5])
    times = StepTimes(schedule, stages, shares_of(schedule), lambda step: load_W)
    assert times(Task("compute", 0)).seconds.tolist() == [1.5, 2.5, 3.5]
    assert times(Task("answer", 0)).exchanges[0].network.tolist() == [0.5, 1.0, 1.5]
    assert times.compute_seconds == 2.0


def test_a_lookup_must_be_divided_whole():
    with pytest.raises(ValueError, match="divide 1 among"):
        PhaseTimes.model_validate({"compute": 1, "lookup_split": {"route": 0.5}})
