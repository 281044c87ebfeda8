"""The sliders of the page's view Scale, answered by the simulator: schedules on larger clusters.

Touch this when the view gets another slider; the simulator is in simulate/.
"""

from typing import Any

from slipstream.simulate.cluster import open_cluster
from slipstream.simulate.training_simulation import TrainingReport, simulate_training
from slipstream.ui import page_messages as pm

STEPS = 6  # simulated after the warm-up
CLUSTER = "accelerators"  # the description that the sliders change
SHOWN_STEPS = 1


def simulate_scale(request: pm.ScaleRequest) -> pm.ScaleAnswer:
    """Simulate each schedule on the chosen cluster, and on one node for its efficiency."""
    values: dict[str, Any] = open_cluster(CLUSTER).model_dump(mode="json")
    values["network"]["gb_per_s"] = request.network_gb_per_s
    values["workload"]["samples"] = request.samples
    node = values["devices_per_node"]
    rows = []
    for schedule in request.schedules:
        found = simulate_training(values, schedule, workers=request.workers, steps=STEPS)
        base = simulate_training(values, schedule, workers=min(node, request.workers), steps=STEPS)
        rows.append(_row(found, base))
    return pm.ScaleAnswer(rows, request.workers * request.samples, _command(request))


def _command(request: pm.ScaleRequest) -> str:
    """Return the command that simulates the same; what is no flag goes into a cluster file."""
    told = open_cluster(CLUSTER).model_dump(mode="json")
    changed = []
    if request.network_gb_per_s != told["network"]["gb_per_s"]:
        changed.append(f"network.gb_per_s: {request.network_gb_per_s:g}")
    if request.samples != told["workload"]["samples"]:
        changed.append(f"workload.samples: {request.samples}")
    words = (
        f"slipstream simulate training --cluster {'FILE' if changed else CLUSTER} "
        f"--workers {request.workers} --schedule {','.join(request.schedules)} --steps {STEPS}"
    )
    note = f"  # FILE: {CLUSTER}.yaml with {', '.join(changed)}" if changed else ""
    return words + note


def _row(found: TrainingReport, base: TrainingReport) -> pm.ScaleRow:
    per_worker = base.samples_per_second / base.workers
    return pm.ScaleRow(
        found.schedule,
        1e3 * found.step_seconds,
        found.samples_per_second,
        found.samples_per_second / found.workers / per_worker,
        found.compute_utilisation,
        found.exposed_lookup,
        found.exposed_comm,
        found.imbalance,
        found.bound,
        _timeline(found),
    )


def _timeline(found: TrainingReport) -> pm.TraceAnswer:
    """Return one simulated step as the view Pipeline draws it."""
    from slipstream.pipeline.schedule import PACE
    from slipstream.ui.run_records import blocks_between

    ends = sorted(each.end for each in found.intervals if each.stage == PACE)
    begin = ends[-1 - SHOWN_STEPS] if len(ends) > SHOWN_STEPS else 0.0
    lanes, blocks = blocks_between(found.intervals, begin, ends[-1] if ends else 0.0)
    span = 1e3 * ((ends[-1] if ends else 0.0) - begin)
    step = 1e3 * found.step_seconds
    shares = {
        "compute_utilisation": found.compute_utilisation,
        "exposed_lookup": found.exposed_lookup,
        "exposed_comm": found.exposed_comm,
    }
    return pm.TraceAnswer(found.schedule, found.schedule, lanes, blocks, span, step, shares)
