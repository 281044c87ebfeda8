"""Schedules read aloud: their stages, the numbers they take, and the ones they refuse."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.pipeline.schedule import (
    NESTED,
    SCHEDULES,
    SERIAL,
    After,
    Lane,
    make_schedule,
    with_device,
)
from slipstream.training.recipe_sections import TrainConfig


def test_unknown_or_impossible_schedules_are_refused_in_words():
    with pytest.raises(SlipstreamError, match="did you mean 'nested'"):
        make_schedule("nestde")
    with pytest.raises(SlipstreamError, match="at least one micro-batch"):
        make_schedule("nested", micro_batches=0)
    with pytest.raises(SlipstreamError, match="cannot work 1 buffers ahead"):
        make_schedule("serial", buffers_ahead=1)
    with pytest.raises(SlipstreamError, match="staleness 1"):
        make_schedule("nested", staleness=1)


def stages_of(schedule):
    return {stage.name: (stage.lane, stage.ahead) for stage in schedule.stages}


def test_nested_can_be_read_aloud():
    assert stages_of(NESTED) == {
        "load": (Lane.LOADER, 3),
        "route": (Lane.NETWORK, 2),
        "place": (Lane.NETWORK, 2),
        "retrieve": (Lane.TABLE, 1),
        "synchronise": (Lane.BUFFER, 0),
        "answer": (Lane.ROWS, 0),
        "compute": (Lane.COMPUTE, 0),
        "collect": (Lane.GRADIENTS, 0),
        "reduce": (Lane.GRADIENTS, 0),
        "update": (Lane.COMPUTE, 0),
        "write": (Lane.WRITER, 0),
    }
    assert NESTED.staleness == 0 and NESTED.micro_batches == 8 and NESTED.row_update == "update"


def test_more_buffers_shift_what_is_done_ahead_and_what_it_waits_for():
    more = make_schedule("nested", buffers_ahead=3)
    assert {name: ahead for name, (_, ahead) in stages_of(more).items() if ahead} == {
        "load": 5,
        "route": 4,
        "place": 4,
        "retrieve": 3,
    }
    assert After("write", back=4) in more["retrieve"].after
    assert more["synchronise"] == NESTED["synchronise"]
    # So many retrievals at a time, but where their order decides what they see.
    assert (NESTED["retrieve"].threads, more["retrieve"].threads) == (1, 3)
    assert make_schedule("semi_async", staleness=3)["retrieve"].threads == 1


def test_more_staleness_lets_rows_be_read_earlier():
    stale = make_schedule("semi_async", staleness=3)
    assert (stale.staleness, stale.buffers_ahead, stale["answer"].ahead) == (3, 4, 3)
    assert After("update_rows", back=4) in stale["synchronise"].after
    assert make_schedule("six_stage", staleness=3).buffers_ahead == 3


def test_only_the_plain_loop_is_called_synchronous():
    assert "synchronous" not in SCHEDULES and SERIAL.serial
    recipes = set(TrainConfig.model_fields["schedule"].annotation.__args__)
    assert recipes == {"auto", "synchronous", *SCHEDULES} - {"serial"}


def test_an_accelerator_adds_a_lane_before_compute():
    names = [stage.name for stage in with_device(NESTED).stages]
    assert names.index("transfer") == names.index("compute") - 1
    assert After("transfer", micro=0) in with_device(NESTED)["compute"].after
