"""Plans hold what they promise, grow with demand, and say when nothing fits."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.models.flops import forward_flops
from slipstream.simulate import Demand, make_plan, open_cluster, planner, simulate_serving
from slipstream.simulate.planner import (
    _instance_config,
    device_spec,
    plan_serving,
    plan_training,
)

SMALL = {
    "name": "small",
    "devices_per_node": 4,
    "device": {"teraflops": 1.0, "efficiency": 0.4, "memory_gb": 16},
    "host": {"memory_gb": 8},
    "workload": {
        "model": {"dim": 64, "blocks": 2, "heads": 2, "max_len": 512},
        "samples": 16,
        "items": 10_000_000,
        "lengths": {"median": 100, "sigma": 0.5, "longest": 512},
    },
}
DEMAND = Demand(requests_per_second=20, events_per_second=20_000, history=200)


@pytest.fixture(scope="module")
def plan():
    return make_plan(DEMAND, SMALL, requests=200)


def test_a_plan_keeps_up_and_fits(plan):
    training, serving = plan.training, plan.serving
    assert training.events_per_second >= DEMAND.events_per_second
    assert training.table_gb <= 8 and training.shards * training.replicas == training.workers
    assert serving.within_slo >= 0.99 and serving.instances >= 1
    assert plan.dollars_per_hour == 2.0 * (training.workers + serving.instances)
    assert len(plan.reasons) == 6 and all(plan.reasons)


def test_sensitivity_has_a_row_for_every_input_and_more_demand_never_needs_less(plan):
    rows = {row["change"]: row for row in plan.sensitivity}
    assert len(rows) == 6
    assert rows["twice the events"]["workers"] >= plan.training.workers
    assert rows["twice the requests"]["instances"] >= plan.serving.instances


def test_tables_larger_than_a_host_need_more_shards():
    few = plan_training(DEMAND, open_cluster(SMALL))[0]
    larger = SMALL | {"workload": SMALL["workload"] | {"items": 200_000_000}}
    many = plan_training(DEMAND, open_cluster(larger))[0]
    assert many.shards > few.shards and many.table_gb <= 8


def test_half_the_instances_do_not_hold():
    slow = open_cluster(SMALL | {"device": SMALL["device"] | {"teraflops": 0.02}})
    busy = Demand(requests_per_second=100, history=400, pages=1)
    found = plan_serving(busy, slow, 400)[0]
    assert found.instances >= 4
    half = simulate_serving(
        instances=found.instances // 2,
        rate=100,
        requests=400,
        spec=device_spec(slow),
        traffic={
            "pages": 1,
            "lengths": {"median": 400, "sigma": 0.5, "shortest": 1, "longest": 512},
        },
        config=_instance_config(busy, slow, found.instances, int(1e6 * found.prefix_mb)),
    )
    assert half.within_slo < 0.99


def test_a_device_takes_the_time_of_the_models_flops():
    place = open_cluster(SMALL)
    spec, model = device_spec(place), place.workload.model
    cost, tokens = spec.cost_model(), 400
    flops = forward_flops(model, [tokens], negatives=0) - 2 * tokens * model.dim
    without_call = cost.plain_seconds(tokens, 0) - spec.coefficients[0]
    assert without_call == pytest.approx(flops / 0.4e12, rel=0.01)


def test_what_cannot_be_planned_is_said(monkeypatch):
    with pytest.raises(SlipstreamError, match="gives times and no workload"):
        make_plan(DEMAND, "nestpipe")
    monkeypatch.setattr(planner, "MOST_WORKERS", 4)
    with pytest.raises(SlipstreamError, match="do not keep up"):
        plan_training(Demand(events_per_second=1e12), open_cluster(SMALL))


def test_the_same_seed_gives_the_same_plan(plan):
    again = make_plan(DEMAND, SMALL, requests=200, sensitivity=False)
    assert (again.training, again.serving) == (plan.training, plan.serving)


def test_what_a_request_takes_besides_its_pass_needs_instances():
    asked = DEMAND.model_copy(update={"requests_per_second": 400.0})
    found = {}
    for request_us in (0.0, 20_000.0):
        host = SMALL["host"] | {"request_us": request_us}
        plan, reasons = plan_serving(asked, open_cluster(SMALL | {"host": host}), 300)
        found[request_us] = plan.instances
        assert f"takes {request_us / 1e3:.1f} ms of its instance" in reasons[0]
    assert found[20_000.0] > found[0.0] + 4
