"""An instance in numbers: where prefixes were found, what was refused, what memory holds.

Touch this to show another counter or gauge in /metrics and the benchmarks.
"""

from typing import TYPE_CHECKING, get_args

from slipstream.serving.instance.cost_model import KINDS
from slipstream.serving.instance.instance_config import Hit
from slipstream.serving.instance.scheduler import Kind
from slipstream.serving.instance.trigger import REFUSALS

if TYPE_CHECKING:
    from slipstream.serving.instance.instance import Instance


def collect_stats(instance: "Instance") -> dict[str, float]:
    """Return counters and gauges by name; a counter that was never raised is there as 0."""
    cache, inflight = instance.prefixes.cache, instance.prefixes.inflight
    found: dict[str, float] = {f"hit_{hit}": 0 for hit in get_args(Hit)}
    found |= {f"refused_{reason}": 0 for reason in REFUSALS}
    found |= {name: float(count) for name, count in instance.counts.items()}
    found |= {f"queue_{kind.name.lower()}": instance.scheduler.waiting(kind) for kind in Kind}
    found |= {f"cost_factor_{kind}": instance.cost.factor(kind) for kind in KINDS}
    found |= {
        f"busy_seconds_{kind.name.lower()}": seconds
        for kind, seconds in instance.scheduler.busy_seconds.items()
    }
    found |= {
        "outstanding_behaviours": instance.backlog,
        "ranking_in_flight": instance.ranking,
        "device_bytes": cache.used,
        "device_budget_bytes": cache.budget,
        "device_pinned_bytes": cache.pinned,
        "device_entries": len(cache),
        "device_pins_refused": cache.refused_pins,
        "device_evictions": cache.evictions,
        "prefixes_computed": inflight.computed,
        "prefixes_extended": inflight.extended,
        "prefixes_reloaded": inflight.reloaded,
        "prefixes_extended_from_host": inflight.extended_from_host,
        "longest_step_seconds": instance.scheduler.longest_step,
        "batched": instance.scheduler.batched,
    }
    index = None if instance.engine.search is None else instance.engine.search.index
    if index is not None:
        found["search_recall"] = index.recall
    host = instance.prefixes.expander
    if host is not None:
        found |= {
            "host_bytes": host.used,
            "host_budget_bytes": host.budget,
            "host_allocated_bytes": host.allocated,
            "host_entries": len(host),
        }
        found |= {"host_warm": host.warm, "host_damaged": host.damaged}
    return {name: float(value) for name, value in found.items()}
