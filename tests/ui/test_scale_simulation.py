"""The sliders of the page change what the simulator is asked."""

import pytest

from slipstream.ui.page_messages import ScaleRequest
from slipstream.ui.scale_simulation import simulate_scale


def test_schedules_are_told_side_by_side_with_a_step_each():
    answer = simulate_scale(ScaleRequest(workers=16))
    serial, nested = answer.rows
    assert (serial.schedule, nested.schedule) == ("serial", "nested")
    assert nested.step_ms < serial.step_ms and 0 < nested.efficiency <= 1.01
    assert answer.global_batch == 16 * 64
    for row in answer.rows:
        assert {block.stage for block in row.timeline.blocks} >= {"compute", "update"}
        assert all(block.end_ms <= row.timeline.span_ms + 1e-6 for block in row.timeline.blocks)
    words = "slipstream simulate training --cluster accelerators --workers 16 --schedule "
    assert answer.command == f"{words}serial,nested --steps 6"
    other = simulate_scale(ScaleRequest(workers=2, samples=8, schedules=["nested"])).command
    assert other.endswith("# FILE: accelerators.yaml with workload.samples: 8")


@pytest.mark.parametrize(
    ("change", "grows"), [({"network_gb_per_s": 1.0}, True), ({"samples": 16}, False)]
)
def test_a_slower_network_and_a_smaller_batch_change_the_step(change, grows):
    usual = simulate_scale(ScaleRequest(workers=16, schedules=["serial"])).rows[0].step_ms
    other = simulate_scale(ScaleRequest(workers=16, schedules=["serial"], **change)).rows[0].step_ms
    assert (other > usual) == grows
