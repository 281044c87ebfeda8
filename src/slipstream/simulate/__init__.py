"""Simulation and planning: the same schedules and policies at any number of workers and users.

Touch this room to ask what a larger cluster or fleet would do; the schedules themselves are in
`pipeline/`, the policies in `serving/`.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

__all__ = [
    "Cluster",
    "Demand",
    "EngineSpec",
    "Plan",
    "ServingReport",
    "TrainingReport",
    "make_plan",
    "open_cluster",
    "scale_training",
    "simulate_serving",
    "simulate_training",
    "slo_rate",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "Cluster": "cluster",
        "Demand": "planner",
        "EngineSpec": "simulated_engine",
        "Plan": "planner",
        "ServingReport": "serving_simulation",
        "TrainingReport": "training_simulation",
        "make_plan": "planner",
        "open_cluster": "cluster",
        "scale_training": "training_simulation",
        "simulate_serving": "serving_simulation",
        "simulate_training": "training_simulation",
        "slo_rate": "serving_simulation",
    },
)

if TYPE_CHECKING:
    from slipstream.simulate.cluster import Cluster as Cluster
    from slipstream.simulate.cluster import open_cluster as open_cluster
    from slipstream.simulate.planner import Demand as Demand
    from slipstream.simulate.planner import Plan as Plan
    from slipstream.simulate.planner import make_plan as make_plan
    from slipstream.simulate.serving_simulation import ServingReport as ServingReport
    from slipstream.simulate.serving_simulation import simulate_serving as simulate_serving
    from slipstream.simulate.serving_simulation import slo_rate as slo_rate
    from slipstream.simulate.simulated_engine import EngineSpec as EngineSpec
    from slipstream.simulate.training_simulation import TrainingReport as TrainingReport
    from slipstream.simulate.training_simulation import scale_training as scale_training
    from slipstream.simulate.training_simulation import simulate_training as simulate_training
