"""Every figure of a server has a kind and a meaning."""

import pytest

from slipstream.serving.http.metric_names import METRICS, metric_of


@pytest.mark.parametrize(
    ("figure", "name", "kind", "word"),
    [
        ("instance_hit_device", "instance_hits", "counter", "device"),
        ("instance_refused_too_late", "instance_refusals", "counter", "too_late"),
        ("instance_queue_rank", "instance_queue", "gauge", "rank"),
        ("instance_demoted", "", "counter", ""),
        ("router_ejected_slow", "router_ejected", "counter", "slow"),
        ("router_ticket_invalid", "router_events", "counter", "ticket_invalid"),
        ("router_instance_ready", "", "gauge", ""),
    ],
)
def test_a_word_of_a_figure_becomes_a_label(figure: str, name: str, kind: str, word: str):
    metric, found = metric_of(figure)
    assert (metric.name, metric.kind, found) == (name, kind, word)


def test_helps_are_sentences_and_names_are_unique():
    names = [metric.name or metric.figure for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.help.endswith(".") and len(metric.help.split()) >= 3
        assert metric.help.rstrip(".").lower() != metric.figure.replace("_", " ")


def test_a_figure_nobody_described_is_a_gauge_of_its_name():
    metric, word = metric_of("queue length")
    assert (metric.figure, metric.kind, word) == ("queue_length", "gauge", "")
