"""Training: recipes, the recommender, the loop and its schedules, evaluation, checkpoints, reports.

Touch this room when a model is trained, evaluated or saved in another way.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

__all__ = [
    "Callback",
    "Evaluation",
    "Features",
    "LossFunction",
    "MetricFunction",
    "OwnFunctions",
    "Ranks",
    "Recipe",
    "Recommendation",
    "Recommender",
    "RetrievalLossInputs",
    "RunResult",
    "StepInputs",
    "StepPlan",
    "TableKeys",
    "TrainingSession",
    "TuneResult",
    "evaluate",
    "evaluate_in_detail",
    "evaluate_run",
    "evaluate_sampled",
    "evaluate_without_request_time",
    "export_recommender",
    "make_adamw",
    "open_run",
    "recommend",
    "recommend_user",
    "train",
    "train_step",
    "write_report",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "Callback": "callbacks",
        "TrainingSession": "callbacks",
        "TuneResult": "tuning",
        "RetrievalLossInputs": "objective",
        "OwnFunctions": "own_functions",
        "MetricFunction": "own_functions",
        "LossFunction": "own_functions",
        "recommend_user": "recommendation",
        "evaluate_run": "run_evaluation",
        "evaluate_in_detail": "evaluation",
        "Evaluation": "evaluation",
        "Features": "features",
        "Ranks": "ranks",
        "Recipe": "recipe",
        "Recommendation": "recommendation",
        "Recommender": "recommender",
        "RunResult": "run",
        "StepInputs": "step",
        "StepPlan": "step",
        "TableKeys": "step",
        "evaluate": "evaluation",
        "evaluate_sampled": "evaluation",
        "evaluate_without_request_time": "evaluation",
        "export_recommender": "export",
        "make_adamw": "optimizers",
        "open_run": "run",
        "recommend": "recommendation",
        "train": "run",
        "train_step": "loop",
        "write_report": "report",
    },
)

if TYPE_CHECKING:
    from slipstream.training.callbacks import Callback as Callback
    from slipstream.training.callbacks import TrainingSession as TrainingSession
    from slipstream.training.evaluation import Evaluation as Evaluation
    from slipstream.training.evaluation import evaluate as evaluate
    from slipstream.training.evaluation import evaluate_in_detail as evaluate_in_detail
    from slipstream.training.evaluation import evaluate_sampled as evaluate_sampled
    from slipstream.training.evaluation import (
        evaluate_without_request_time as evaluate_without_request_time,
    )
    from slipstream.training.export import export_recommender as export_recommender
    from slipstream.training.features import Features as Features
    from slipstream.training.loop import train_step as train_step
    from slipstream.training.objective import RetrievalLossInputs as RetrievalLossInputs
    from slipstream.training.optimizers import make_adamw as make_adamw
    from slipstream.training.own_functions import LossFunction as LossFunction
    from slipstream.training.own_functions import MetricFunction as MetricFunction
    from slipstream.training.own_functions import OwnFunctions as OwnFunctions
    from slipstream.training.ranks import Ranks as Ranks
    from slipstream.training.recipe import Recipe as Recipe
    from slipstream.training.recommendation import Recommendation as Recommendation
    from slipstream.training.recommendation import recommend as recommend
    from slipstream.training.recommendation import recommend_user as recommend_user
    from slipstream.training.recommender import Recommender as Recommender
    from slipstream.training.report import write_report as write_report
    from slipstream.training.run import RunResult as RunResult
    from slipstream.training.run import open_run as open_run
    from slipstream.training.run import train as train
    from slipstream.training.run_evaluation import evaluate_run as evaluate_run
    from slipstream.training.step import StepInputs as StepInputs
    from slipstream.training.step import StepPlan as StepPlan
    from slipstream.training.step import TableKeys as TableKeys
    from slipstream.training.tuning import TuneResult as TuneResult
