"""Requests counted by endpoint, hit and reason; of several routers, all of them together."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.serving.http import request_metrics
from slipstream.serving.http.request_metrics import RequestMetrics, metric_names, sharing
from tests.support.serve_command import figure


def router(file: Path | None, retries: float = 0.0, outstanding: float = 0.0) -> RequestMetrics:
    figures = {
        ("router_retries",): retries,
        ("router_outstanding_behaviours", "i-0"): outstanding,
        ("router_instance_ready", "i-0"): 1.0,
        ("instance_hit_device", "i-0"): 7.0,
    }
    return RequestMetrics(lambda: figures, ("instance",), file=file)


def read(metrics: RequestMetrics) -> dict[str, object]:
    return {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}


def test_times_are_a_histogram_by_endpoint_hit_and_reason():
    metrics = router(None)
    metrics.count("rank", 200, 0.003, hit="device")
    metrics.count("rank", 200, 9.0, hit="device")
    metrics.count("rank", 503, 0.5, reason="store_unavailable")
    metrics.count("preinfer", 202, 0.001, reason="admitted")
    text = metrics.text().decode()
    start = 'slipstream_request_seconds_bucket{endpoint="rank",hit="device",le='
    for edge, count in (("0.002", 0), ("0.005", 1), ("2.56", 1), ("+Inf", 2)):
        assert f'{start}"{edge}",reason=""}} {count}.0' in text
    assert 'slipstream_answers_total{endpoint="rank",status="503"} 1.0' in text
    assert 'hit="",reason="store_unavailable"} 0.5' in text
    assert figure(text, "slipstream_request_seconds_count") == 4


def test_counters_are_counters_and_every_metric_says_what_it_means():
    found = read(router(None, retries=3.0))
    kinds = {name: family.type for name, family in found.items()}
    assert kinds["slipstream_request_seconds"] == "histogram"
    assert kinds["slipstream_answers"] == kinds["slipstream_router_events"] == "counter"
    assert kinds["slipstream_instance_hits"] == "counter"
    assert kinds["slipstream_router_instance_ready"] == "gauge"
    for name, family in found.items():
        assert family.documentation.endswith(".") and family.documentation != name
    sampled = {sample.name for family in found.values() for sample in family.samples}
    assert sampled <= metric_names() | {
        f"slipstream_request_seconds_{end}" for end in ("bucket", "count", "sum")
    }


def test_any_router_shows_what_all_of_them_counted(tmp_path: Path):
    first, second = (
        router(tmp_path / f"router-{n}.metrics", retries=2.0 + n, outstanding=10.0) for n in (0, 1)
    )
    for metrics, count in ((first, 3), (second, 4)):
        for _ in range(count):
            metrics.count("rank", 200, 0.01, hit="device")
        metrics.share()
    for metrics in (first, second):
        text = metrics.text().decode()
        assert figure(text, "slipstream_answers_total") == 7
        assert figure(text, "slipstream_request_seconds_count") == 7
        assert 'slipstream_router_events_total{event="retries"} 5.0' in text
        assert figure(text, "slipstream_router_outstanding_behaviours") == 20
        assert figure(text, "slipstream_router_instance_ready") == 1, "not summed"
        assert figure(text, "slipstream_instance_hits_total") == 7, "told by the instance itself"


def test_a_router_that_was_killed_goes_on_from_its_file(tmp_path: Path):
    file = tmp_path / "router-0.metrics"
    first = router(file, retries=2.0, outstanding=10.0)
    first.count("rank", 200, 0.01)
    first.share()
    again = router(file, retries=1.0, outstanding=0.0)
    again.count("rank", 200, 0.01)
    text = again.text().decode()
    assert figure(text, "slipstream_answers_total") == 2
    assert 'slipstream_router_events_total{event="retries"} 3.0' in text
    assert figure(text, "slipstream_router_outstanding_behaviours") == 0, "a gauge does not add up"


def test_a_damaged_file_or_a_full_disk_costs_no_scrape(tmp_path: Path):
    (tmp_path / "router-1.metrics").write_bytes(b"not counted")
    metrics = router(tmp_path / "absent" / "router-0.metrics")
    metrics.share()
    assert b"slipstream_answers" in metrics.text()
    assert b"slipstream_answers" in router(tmp_path / "router-0.metrics").text()


def test_counts_are_shared_while_a_router_runs_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request_metrics, "SHARE_SECONDS", 0.01)
    file = tmp_path / "router-0.metrics"

    async def run() -> None:
        metrics = router(file)
        async with sharing(metrics):
            while not file.exists():
                await asyncio.sleep(0.005)
            metrics.count("rank", 200, 0.01)

    asyncio.run(asyncio.wait_for(run(), 30))
    other = router(tmp_path / "router-1.metrics")
    assert figure(other.text().decode(), "slipstream_answers_total") == 1
