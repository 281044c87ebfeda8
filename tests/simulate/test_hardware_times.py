"""Bytes over bandwidth, rows times their time: by hand for small cases."""

import pytest

from slipstream.models.model_config import ModelConfig
from slipstream.pipeline.schedule import make_schedule
from slipstream.simulate.cluster import open_cluster
from slipstream.simulate.hardware_times import (
    GroupLinks,
    compute_seconds,
    dense_parameters,
    hardware_stages,
)
from slipstream.simulate.workload import Workload


def cluster(**values):
    links = {
        "devices_per_node": 4,
        "node": {"gb_per_s": 100, "latency_us": 1},
        "network": {"gb_per_s": 10, "latency_us": 10},
    }
    return open_cluster({"workload": {"samples": 8, "items": 10_000}} | links | values)


def test_an_all_to_all_sends_most_bytes_over_the_network():
    group = GroupLinks.of(cluster(), 8)
    found = group.all_to_all("group", 7e9)  # 3 neighbours, 4 others
    assert found.network == pytest.approx(0.4) and found.latency == pytest.approx(43e-6)
    inside = GroupLinks.of(cluster(), 4).all_to_all("group", 3e9)
    assert inside.network == pytest.approx(0.03)
    incast = {"gb_per_s": 10, "latency_us": 10, "incast": 0.1}
    slower = GroupLinks.of(cluster(network=incast), 8).all_to_all("group", 7e9)
    assert slower.network == pytest.approx(0.4 * 1.3)


def test_replicas_lie_on_other_nodes_and_rings_use_both_links():
    assert GroupLinks.of(cluster(), 4, spacing=4).neighbours == 1
    assert GroupLinks.of(cluster(), 4, spacing=2).neighbours == 2
    ring = GroupLinks.of(cluster(), 8).all_reduce("everybody", 4e9)
    assert ring.network == pytest.approx(2 * 3 / 4 * 0.04 + 2 * 1 / 2 * 1e9 / 10e9)
    assert GroupLinks.of(cluster(), 1).all_reduce("everybody", 4e9).network == 0.0


def test_one_worker_exchanges_nothing():
    place = cluster()
    stages = hardware_stages(place, place.workload, make_schedule("nested"), 1, 1)
    assert all(e.network == 0 for stage in stages.values() for e in stage.exchanges + stage.last)


def test_more_workers_ask_owners_for_fewer_different_rows_each():
    place, schedule = cluster(), make_schedule("serial")
    few, many = (hardware_stages(place, place.workload, schedule, n, 1) for n in (2, 32))
    assert many["retrieve"].seconds < few["retrieve"].seconds
    assert many["route"].seconds > few["route"].seconds  # a list from every requester
    double = hardware_stages(place, place.workload, make_schedule("dual_buffer"), 32, 1)
    assert double["retrieve"].seconds < many["retrieve"].seconds  # buffers keep what comes again


def test_compute_is_flops_over_the_rate_and_parameters_are_the_models():
    place = cluster(device={"teraflops": 10, "efficiency": 0.5})
    assert compute_seconds(place, place.workload) == pytest.approx(place.workload.flops / 5e12)
    model = ModelConfig.model_validate({"kind": "hstu", "dim": 64, "blocks": 3, "heads": 2})
    work = Workload.model_validate({"model": model})
    assert dense_parameters(work) == 3 * (4 * 64 * 64 + 64 * 64)
