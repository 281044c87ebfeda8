"""One door to all models: a config and a task in, a module out."""

from collections.abc import Sequence

from torch import nn

from slipstream.models.model_config import ModelConfig, Task
from slipstream.models.ranking import RankingModel
from slipstream.models.retrieval import RetrievalModel


def build_model(
    config: ModelConfig,
    task: Task,
    tasks: Sequence[str] = (),
    user_features: Sequence[str] = (),
    item_features: Sequence[str] = (),
) -> RetrievalModel | RankingModel:
    """The model of a recipe. Weights depend on torch's seed alone."""
    if task == "ranking":
        return RankingModel(config, tasks, user_features, item_features)
    if task == "retrieval":
        return RetrievalModel(config, user_features, item_features)
    raise ValueError(f"unknown task '{task}': retrieval or ranking")


def dense_parameters(model: nn.Module) -> int:
    """Parameters of the model itself; embedding tables are not part of it."""
    return sum(parameter.numel() for parameter in model.parameters())
