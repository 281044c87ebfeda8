"""Schedules of a training step as data: stages, lanes, hazards, one executor, and the trace.

Touch this room when lookups, exchange and compute should overlap in another way.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

__all__ = [
    "DUAL_BUFFER",
    "FROZEN_WINDOW",
    "NESTED",
    "SCHEDULES",
    "SEMI_ASYNC",
    "SERIAL",
    "SIX_STAGE",
    "After",
    "Lane",
    "LaneGroups",
    "MicroBatch",
    "Pipeline",
    "Schedule",
    "Stage",
    "StepResult",
    "Trace",
    "Work",
    "cluster_samples",
    "draw_timeline",
    "make_schedule",
    "read_trace",
    "shares",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "DUAL_BUFFER": "schedule",
        "FROZEN_WINDOW": "schedule",
        "NESTED": "schedule",
        "SCHEDULES": "schedule",
        "SEMI_ASYNC": "schedule",
        "SERIAL": "schedule",
        "SIX_STAGE": "schedule",
        "After": "schedule",
        "Lane": "schedule",
        "LaneGroups": "lane_groups",
        "MicroBatch": "work",
        "Pipeline": "runner",
        "Schedule": "schedule",
        "Stage": "schedule",
        "StepResult": "work",
        "Trace": "trace",
        "Work": "work",
        "cluster_samples": "clustering",
        "draw_timeline": "timeline",
        "make_schedule": "schedule",
        "read_trace": "trace",
        "shares": "trace",
    },
)

if TYPE_CHECKING:
    from slipstream.pipeline.clustering import cluster_samples as cluster_samples
    from slipstream.pipeline.lane_groups import LaneGroups as LaneGroups
    from slipstream.pipeline.runner import Pipeline as Pipeline
    from slipstream.pipeline.schedule import DUAL_BUFFER as DUAL_BUFFER
    from slipstream.pipeline.schedule import FROZEN_WINDOW as FROZEN_WINDOW
    from slipstream.pipeline.schedule import NESTED as NESTED
    from slipstream.pipeline.schedule import SCHEDULES as SCHEDULES
    from slipstream.pipeline.schedule import SEMI_ASYNC as SEMI_ASYNC
    from slipstream.pipeline.schedule import SERIAL as SERIAL
    from slipstream.pipeline.schedule import SIX_STAGE as SIX_STAGE
    from slipstream.pipeline.schedule import After as After
    from slipstream.pipeline.schedule import Lane as Lane
    from slipstream.pipeline.schedule import Schedule as Schedule
    from slipstream.pipeline.schedule import Stage as Stage
    from slipstream.pipeline.schedule import make_schedule as make_schedule
    from slipstream.pipeline.timeline import draw_timeline as draw_timeline
    from slipstream.pipeline.trace import Trace as Trace
    from slipstream.pipeline.trace import read_trace as read_trace
    from slipstream.pipeline.trace import shares as shares
    from slipstream.pipeline.work import MicroBatch as MicroBatch
    from slipstream.pipeline.work import StepResult as StepResult
    from slipstream.pipeline.work import Work as Work
