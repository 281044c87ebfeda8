"""Alerts, board, scrapes and the autoscaler name metrics and labels that a server has.

No Prometheus and no Grafana run here: the files are checked against the server's own table of
metrics, and tests/system/test_deploy.py reads them from a running server.
"""

import re

import pytest

from slipstream.serving.http.endpoints import ENDPOINTS, KEY_HEADER
from slipstream.serving.http.metric_names import METRICS
from slipstream.serving.http.request_metrics import BUCKETS, metric_names
from tests.support.deploy_files import (
    ROOT,
    alerts,
    board,
    document,
    labels_of,
    matched_values,
    metrics_of,
    queries,
)

HISTOGRAM = {f"slipstream_request_seconds_{part}" for part in ("bucket", "count", "sum")}
KNOWN = metric_names() | HISTOGRAM | {"up"}
LABELS = {"endpoint", "hit", "reason", "status", "le", "instance"} | {m.label for m in METRICS}
OF_TARGETS = {"server", "job", "pod", "namespace"}
SCRAPES = ("prometheus/prometheus.yml", "prometheus/kubernetes.yml")
each_query = pytest.mark.parametrize("where", sorted(queries()))


@each_query
def test_a_query_names_known_metrics_and_labels(where: str):
    query = queries()[where]
    assert metrics_of(query) <= KNOWN and metrics_of(query)
    assert labels_of(query) <= LABELS | OF_TARGETS
    assert matched_values(query, "endpoint") <= {each.name for each in ENDPOINTS}
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


@pytest.mark.parametrize("query", ["sum(slipstream_no_such_thing)", "nothing(up)", "uptime > 3"])
def test_a_query_of_something_else_is_found(query: str):
    with pytest.raises(AssertionError):
        assert metrics_of(query) <= KNOWN


def test_alerts_say_what_is_wrong_and_where():
    assert len(alerts()) >= 8
    for group in document("prometheus/rules.yml")["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in ("page", "ticket")
            told = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
            assert "server" in told
            kept = labels_of(rule["expr"]) if "by (" in rule["expr"] else LABELS | OF_TARGETS
            assert set(told) <= kept, rule["alert"]


def test_every_alert_is_in_the_guide_and_no_other():
    guide = (ROOT / "docs/guides/operating.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(Slipstream[A-Z]\w+)`", guide)) == set(alerts())


def test_the_slow_alert_is_a_bucket_and_the_slo():
    limit = float(alerts()["SlipstreamSlowRanking"].rpartition(">")[2])
    assert limit in BUCKETS and limit * 1000 == document("serve.yaml")["slo-ms"]


@pytest.mark.parametrize("name", SCRAPES)
def test_a_scrape_sends_the_key_and_labels_what_the_queries_need(name: str):
    (job,) = document(name)["scrape_configs"]
    assert job["job_name"] == "slipstream" and job["honor_labels"] is True
    (source,) = job["http_headers"][KEY_HEADER]["files"]
    assert source.startswith("/run/secrets/")
    assert job.get("metrics_path", "/metrics") in {each.path for each in ENDPOINTS}
    labels = {each.get("target_label") for each in job["relabel_configs"]}
    assert "server" in labels
    if "kubernetes_sd_configs" in job:
        assert {"pod", "namespace"} <= labels


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_known_series():
    made = set()
    for rule in document("prometheus/adapter-rules.yml")["rules"]:
        (series,) = metrics_of(rule["seriesQuery"])
        assert series in KNOWN
        name = rule["name"]
        found = re.fullmatch(name["matches"], series)
        assert found is not None
        made.add(found.expand(name["as"].replace("${1}", r"\1")) if "as" in name else series)
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    metrics = document("kubernetes/autoscaler.yaml")["spec"]["metrics"]
    assert metrics and {each["pods"]["metric"]["name"] for each in metrics} <= made


def test_the_board_has_a_place_for_every_panel_and_one_source():
    (source,) = document("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    found = board()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"])
             for y in range(p["y"], p["y"] + p["h"])]  # fmt: skip
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    sources = [panel["datasource"]["uid"] for panel in panels]
    sources += [each["datasource"]["uid"] for each in found["templating"]["list"]]
    assert set(sources) == {source["uid"]}
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_metrics_that_the_manual_names_exist():
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        quoted = set(re.findall(r"`(slipstream_(?:router|instance|request|answers)_?\w*)", text))
        assert quoted <= KNOWN, page.name
