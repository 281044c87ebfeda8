"""An instance in numbers, for /metrics and the benchmarks: where prefixes were found, what was
refused, what memory holds.
"""

from typing import TYPE_CHECKING, get_args

from slipstream.serving.instance.cost_model import KINDS
from slipstream.serving.instance.instance_config import Hit
from slipstream.serving.instance.scheduler import Kind
from slipstream.serving.instance.trigger import REFUSALS

if TYPE_CHECKING:
    from slipstream.serving.instance.instance import Instance


def figures(instance: "Instance") -> dict[str, float]:
    """Counters and gauges under their names; counters that have not moved are there as 0."""
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
        "outstanding_tokens": instance.outstanding_tokens,
        "ranking_in_flight": instance.ranking,
        "device_bytes": instance.cache.used,
        "device_budget_bytes": instance.cache.budget,
        "device_pinned_bytes": instance.cache.pinned,
        "device_entries": len(instance.cache),
        "device_evictions": instance.cache.evictions,
        "prefixes_computed": instance.flights.computed,
        "prefixes_extended": instance.flights.extended,
        "prefixes_reloaded": instance.flights.reloaded,
        "prefixes_extended_from_host": instance.flights.extended_from_host,
        "longest_step_seconds": instance.scheduler.longest_step,
        "batched": instance.scheduler.batched,
    }
    if instance.expander is not None:
        host = instance.expander
        found |= {
            "host_bytes": host.used,
            "host_budget_bytes": host.budget,
            "host_entries": len(host),
        }
        found |= {"host_warm": host.warm, "host_damaged": host.damaged}
    return {name: float(value) for name, value in found.items()}
