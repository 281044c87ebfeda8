"""Builds a model from its config and task. Touch this when a task or a kind of model is added."""

from collections.abc import Mapping, Sequence

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
    joined: Sequence[str] = (),
    widths: Mapping[str, int] | None = None,
) -> RetrievalModel | RankingModel:
    """Build the model of a recipe; its weights depend on torch's seed alone.

    `joined` names inputs that join the behaviour's token besides the item's row and features;
    `widths` has the inputs whose rows are not as wide as the model, with their widths.
    """
    if task == "ranking":
        return RankingModel(config, tasks, user_features, item_features, joined, widths)
    if task == "retrieval":
        return RetrievalModel(config, user_features, item_features, joined, widths)
    raise ValueError(f"unknown task '{task}': retrieval or ranking")


def dense_parameters(model: nn.Module) -> int:
    """The number of parameters of the model itself, without embedding tables."""
    return sum(parameter.numel() for parameter in model.parameters())
