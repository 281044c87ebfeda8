"""Whole simulated fleets: closed forms, policies that act, trouble, and the same seed twice."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.simulate import EngineSpec, simulate_serving
from slipstream.simulate.serving_simulation import largest_rate, slo_rate
from slipstream.simulate.simulated_engine import SimulatedEngine

LENGTHS = {"median": 1024, "sigma": 0.0, "shortest": 16, "longest": 6144}
FLEET = {
    "instances": 2,
    "rate": 20.0,
    "requests": 400,
    "spec": EngineSpec(jitter=0.0),
    "traffic": {"lengths": LENGTHS, "pages": 1},
}
INLINE = InstanceConfig(relay=False)


def test_an_idle_fleet_answers_in_the_time_of_a_pass():
    report = simulate_serving(**FLEET | {"rate": 0.2, "requests": 40}, config=INLINE)
    spec, tokens = FLEET["spec"], 2 * 1024
    a, b, c, _ = spec.coefficients
    new = tokens + 100
    one_pass = a + b * new + c * new * new / 2
    assert report.p50_ms == pytest.approx(1e3 * one_pass + 3.0, rel=0.1)
    assert report.within_slo == 1.0 and report.hits["inline"] == 40


def test_pre_inference_turns_misses_into_device_hits():
    relay, inline = simulate_serving(**FLEET), simulate_serving(**FLEET, config=INLINE)
    assert relay.hits["device"] > 300 and relay.admitted > 300
    assert relay.p50_ms < inline.p50_ms / 3
    assert relay.filled["computed"] >= relay.hits["device"]


def test_the_same_seed_gives_the_same_result_and_another_one_does_not():
    first, again = simulate_serving(**FLEET), simulate_serving(**FLEET)
    assert first == again and first != simulate_serving(**FLEET, seed=1)


def test_overload_refuses_and_counts():
    report = simulate_serving(**FLEET | {"rate": 400.0}, config=INLINE)
    assert report.within_slo < 0.6 and report.refused and report.busy > 0.5


def test_a_small_device_tier_reloads_from_the_host():
    few = FLEET["spec"].model
    assert few.max_len == 6144
    small = InstanceConfig(host_path="x", device_bytes=8 << 20, host_bytes=1 << 30)
    sessions = {"lengths": LENGTHS, "pages": 40, "gap_seconds": 2.0, "behaviours": 0}
    report = simulate_serving(**FLEET | {"traffic": sessions}, config=small)
    assert report.filled["reloaded"] > 20


def test_deaths_lose_requests_and_the_fleet_goes_on():
    busy = FLEET | {"instances": 4, "rate": 80.0, "requests": 800}
    calm = simulate_serving(**busy)
    dying = simulate_serving(**busy, trouble={"deaths": 4, "restart_seconds": 1.0})
    assert dying.lost > 0 and dying.answered > 0.95
    assert calm.within_slo >= dying.within_slo > 0.9


def test_a_slow_instance_is_ejected():
    busy = FLEET | {"instances": 6, "rate": 60.0, "requests": 1200}
    report = simulate_serving(**busy, trouble={"slow_instances": 1, "slow_factor": 20.0})
    assert sum(report.ejected.values()) > 0 and report.within_slo > 0.85


def test_a_rolling_restart_loses_nothing():
    busy = FLEET | {"instances": 4, "rate": 40.0, "requests": 800}
    report = simulate_serving(**busy, trouble={"rolling_restart": True, "restart_seconds": 0.5})
    assert report.answered > 0.99


def test_a_search_finds_the_largest_rate_on_the_grid():
    assert largest_rate(lambda rate: rate <= 10, 3.0) == pytest.approx(1.15**16)
    assert largest_rate(lambda rate: rate <= 10, 30.0) == pytest.approx(1.15**16)
    assert largest_rate(lambda rate: False, 3.0) == 0.0
    settings = {name: FLEET[name] for name in ("spec", "traffic")}
    one, two = (slo_rate(10.0, 300, instances=n, config=INLINE, **settings) for n in (1, 3))
    assert one < two


def test_enough_cores_without_further_costs_are_a_core_each():
    free = {"instance_seconds": 0.0, "router_seconds": 0.0}
    busy = FLEET | {"rate": 60.0, "http_ms": 0.0, "config": INLINE}
    own = simulate_serving(**busy, calls=free)
    shared = simulate_serving(**busy, calls=free | {"cores": 64})
    assert (shared.p50_ms, shared.p99_ms) == pytest.approx((own.p50_ms, own.p99_ms), rel=1e-6)
    assert shared.hits == own.hits and shared.busy == pytest.approx(own.busy, rel=1e-3)
    both = FLEET | {"rate": 30.0, "http_ms": 0.0}
    own, shared = (simulate_serving(**both, calls=free | more) for more in ({}, {"cores": 64}))
    assert shared.hits == own.hits and shared.p99_ms == pytest.approx(own.p99_ms, rel=1e-6)


def test_more_cores_are_never_slower():
    calls = {"client_seconds": 5e-4, "instance_seconds": 1e-3}
    busy = FLEET | {"rate": 60.0, "config": INLINE}
    found = [simulate_serving(**busy, calls=calls | {"cores": n}) for n in (1, 2, 3, 8)]
    p50s, within = [each.p50_ms for each in found], [each.within_slo for each in found]
    assert p50s == sorted(p50s, reverse=True) and within == sorted(within)
    assert p50s[0] > 2 * p50s[-1]


def test_an_idle_shared_machine_answers_in_the_time_of_pass_and_processes():
    calls = {"client_seconds": 2e-3, "router_seconds": 3e-3, "instance_seconds": 5e-3, "cores": 2}
    settings = FLEET | {"rate": 0.2, "requests": 40, "http_ms": 0.0, "config": INLINE}
    free = simulate_serving(**settings, calls={"instance_seconds": 0.0})
    own = simulate_serving(**settings, calls={"instance_seconds": 5e-3})
    shared = simulate_serving(**settings, calls=calls)
    assert own.p50_ms - free.p50_ms == pytest.approx(5.0)
    assert shared.p50_ms - free.p50_ms == pytest.approx(10.0)


def test_every_request_of_a_batch_pays_for_its_call():
    short = FLEET | {
        "instances": 1,
        "rate": 2_000.0,
        "spec": EngineSpec(jitter=0.0, coefficients=(4e-3, 0.0, 0.0, 0.0)),
        "config": INLINE,
    }
    cheap = simulate_serving(**short, calls={"instance_seconds": 0.0})
    dear = simulate_serving(**short, calls={"instance_seconds": 2e-3})
    assert cheap.within_slo > 0.9 and dear.within_slo < 0.5


def test_a_client_on_shared_cores_announces_what_gains_by_it():
    calls = {"cores": 8}
    long = simulate_serving(**FLEET, calls=calls)
    assert long.admitted > 300 and long.hits["device"] > 300
    brief = FLEET | {"traffic": {"lengths": LENGTHS | {"median": 64}, "pages": 1}}
    assert simulate_serving(**brief, calls=calls).refused == {}
    assert simulate_serving(**brief).refused != {}


def test_shared_cores_give_the_same_result_with_the_same_seed():
    told = {"calls": {"cores": 2, "client_seconds": 3e-4}}
    dying = told | {"trouble": {"deaths": 2, "restart_seconds": 1.0}}
    for settings in (told, dying):
        first, again = (simulate_serving(**FLEET | settings) for _ in range(2))
        assert first == again and first.answered > 0.9


def test_wrong_numbers_are_refused():
    with pytest.raises(SlipstreamError, match="instances"):
        simulate_serving(**FLEET | {"instances": 0})


def test_an_error_of_a_request_ends_the_simulation(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ValueError("no query")

    monkeypatch.setattr(SimulatedEngine, "query_of_rows", broken)
    with pytest.raises(ValueError, match="no query"):
        simulate_serving(instances=2, rate=50.0, requests=100)
