"""What every figure of a server is called in Prometheus: its kind, its label, what it means.

A figure whose name ends with a word of its own (`hit_device`, `refused_overload`) becomes one
metric with that word as a label. Touch this when a figure is added to a server's statistics.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class MetricName:
    """One metric: `figure` is the name in the statistics, where `*` is the value of `label`."""

    figure: str
    kind: Kind
    help: str
    name: str = ""  # in Prometheus, unless it is the figure's
    label: str = ""
    summed: bool = False  # over the routers of a deployment


def _counters(*rows: tuple[str, str]) -> tuple[MetricName, ...]:
    return tuple(MetricName(figure, "counter", text) for figure, text in rows)


def _gauges(*rows: tuple[str, str]) -> tuple[MetricName, ...]:
    return tuple(MetricName(figure, "gauge", text) for figure, text in rows)


METRICS = (
    MetricName("instance_hit_*", "counter", "Rankings by where their prefix was found.",
               "instance_hits", "hit"),
    MetricName("instance_refused_*", "counter", "Pre-inferences that were refused, by reason.",
               "instance_refusals", "reason"),
    MetricName("instance_overloaded_*", "counter", "Rankings refused for overload, by reason.",
               "instance_overloads", "reason"),
    MetricName("instance_queue_*", "gauge", "Jobs that wait for the compute thread, by kind.",
               "instance_queue", "kind"),
    MetricName("instance_cost_factor_*", "gauge", "Seen over predicted time, by kind of work.",
               "instance_cost_factor", "kind"),
    MetricName("instance_busy_seconds_*", "counter", "Seconds of the compute thread, by kind.",
               "instance_busy_seconds", "kind"),
    MetricName("instance_requests_*", "counter", "Requests by the version that served them.",
               "instance_requests", "version"),
    *_counters(
        ("instance_shadow_compared", "Rankings that the candidate scored in the shadow."),
        ("instance_shadow_differed", "Of these, those with a score that differs."),
        ("instance_shadow_top_changed", "Of these, those with another best item."),
        ("instance_shadow_skipped", "Shadow scorings skipped because others were running."),
        ("instance_shadow_failed", "Shadow scorings that failed."),
        ("instance_shadow_difference_sum", "Sum of the largest difference of each comparison."),
        ("instance_preinfer_admitted", "Pre-inferences that were admitted."),
        ("instance_wasted", "Prefixes computed ahead whose ranking never came."),
        ("instance_late", "Rankings that came before their pre-inference had ended."),
        ("instance_demoted", "Prefixes copied to the host tier."),
        ("instance_deadline_passed", "Rankings whose deadline passed."),
        ("instance_truncated", "Rankings of the latest behaviours only, to be in time."),
        ("instance_ticket_expired", "Tickets that had expired."),
        ("instance_ticket_invalid", "Tickets that were not issued here for their user."),
        ("instance_device_pins_refused", "Pins refused because too much was pinned."),
        ("instance_device_evictions", "Prefixes that left the device cache for others."),
        ("instance_prefixes_computed", "Prefixes computed from nothing."),
        ("instance_prefixes_extended", "Prefixes computed from a shorter one."),
        ("instance_prefixes_reloaded", "Prefixes copied back from the host tier."),
        ("instance_prefixes_extended_from_host", "Prefixes computed from one of the host tier."),
        ("instance_batched", "Rankings that shared a pass with others."),
        ("instance_host_damaged", "Entries of the host tier that were damaged."),
        ("instance_items_not_ranked", "Retrieved items that the ranking bundle does not know."),
    ),
    *_gauges(
        ("instance_outstanding_behaviours", "Behaviours whose prefixes are still to be computed."),
        ("instance_ranking_in_flight", "Rankings under way."),
        ("instance_device_bytes", "Bytes of prefixes in the device cache."),
        ("instance_device_budget_bytes", "Bytes that the device cache may have."),
        ("instance_device_pinned_bytes", "Bytes of prefixes that wait for their ranking."),
        ("instance_device_entries", "Prefixes in the device cache."),
        ("instance_host_bytes", "Bytes of prefixes in the host tier."),
        ("instance_host_budget_bytes", "Bytes that the host tier may have."),
        ("instance_host_allocated_bytes", "Bytes of shared memory that the host tier has taken."),
        ("instance_host_entries", "Prefixes in the host tier."),
        ("instance_host_warm", "Prefixes that this process found in the host tier at its start."),
        ("instance_longest_step_seconds", "Longest step of the compute thread so far."),
        ("instance_search_recall", "Share of the best items that the approximate search finds."),
        ("instance_start_time_seconds", "When this process started, in seconds since 1970."),
        ("router_instance_ready", "1 where an instance takes requests, else 0."),
        ("router_breaker_failures", "Failures in a row of an instance."),
        ("router_ejections", "How often in a row an instance was ejected."),
        ("router_connections", "Connections that are open."),
        ("router_peers", "Addresses with an open connection."),
        ("router_versions", "Different stable versions that instances serve; more than 1 is bad."),
    ),
    MetricName("router_outstanding_behaviours", "gauge", "Behaviours sent and not answered yet.",
               summed=True),
    MetricName("router_ejected_*", "counter", "Instances ejected from service, by reason.",
               "router_ejected", "reason", summed=True),
    MetricName("router_*", "counter", "Events of the router, by what happened.",
               "router_events", "event", summed=True),
)  # fmt: skip
_EXACT = {metric.figure: metric for metric in METRICS if not metric.label}
_STARTS = [(metric.figure[:-1], metric) for metric in METRICS if metric.label]


def metric_of(figure: str) -> tuple[MetricName, str]:
    """Return the metric of a figure, and the value of its label."""
    found = _EXACT.get(figure)
    if found is not None:
        return found, ""
    for start, metric in _STARTS:
        if figure.startswith(start):
            return metric, figure.removeprefix(start)
    clean = "".join(c if c.isalnum() else "_" for c in figure)
    return MetricName(clean, "gauge", f"The server's figure {figure}."), ""
