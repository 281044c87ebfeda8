"""A caller's own metrics and loss, as plain functions.

A metric is a function of the places at which a retrieval evaluation found its targets. A loss is a
function of what the shipped losses see. A run records their names, and is resumed only with
functions of the same names. Touch this when a function of another kind can be given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from slipstream.errors import SlipstreamError
from slipstream.training.objective import RETRIEVAL_LOSSES, RetrievalLossInputs
from slipstream.training.recipe import Recipe


class MetricFunction(Protocol):
    """A figure of an evaluation; larger is better where `train.metric` names it."""

    def __call__(self, places_S: torch.Tensor, /) -> float:
        """Compute the figure from the targets' places (float64, one per query, the best is 1).

        Ties count half. A target that must not be recommended is at infinity.
        """
        ...


class LossFunction(Protocol):
    """What a retrieval model minimises."""

    def __call__(self, inputs: RetrievalLossInputs, /) -> torch.Tensor:
        """Compute one value per token [S], each from its own token's values only.

        `inputs.logits()` gives the logits of the targets [S] and of their negatives [S, R].
        """
        ...


@dataclass(frozen=True)
class OwnFunctions:
    """The functions a run is trained with, besides its recipe."""

    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    loss: LossFunction | None = None

    @property
    def names(self) -> dict[str, Any]:
        """What run.json records; empty without functions."""
        named: dict[str, Any] = {"metrics": list(self.metrics)} if self.metrics else {}
        return named if self.loss is None else named | {"loss": function_name("loss", self.loss)}

    def check(self, recipe: Recipe) -> None:
        """Refuse functions that a recipe cannot call."""
        if self.names and recipe.task != "retrieval":
            raise SlipstreamError(
                "own metrics and losses are for retrieval; a ranking recipe has its AUC and bce"
            )
        per_sequence = RETRIEVAL_LOSSES[recipe.loss.kind].negatives == "per_sequence"
        if self.loss is not None and (
            per_sequence or recipe.loss.share > 1 or recipe.loss.fetch == "segmented"
        ):
            raise SlipstreamError(
                "an own loss takes the negatives of each token, of the step or the whole "
                "catalogue; use loss.kind sampled_softmax, shared_softmax or full_softmax, "
                "without loss.share and loss.fetch=segmented"
            )

    def check_resumed(self, directory: object, earlier: Mapping[str, Any]) -> None:
        """Refuse to go on with other functions than a run began with."""
        before = earlier.get("functions") or {}
        if before != self.names:
            raise SlipstreamError(
                f"{directory} holds a run with {_listed(before)}, not with {_listed(self.names)}; "
                "pass the same functions to ss.train, or choose another directory"
            )

    def loss_per_token(self, inputs: RetrievalLossInputs) -> torch.Tensor:
        """Call the own loss and check what it returns."""
        assert self.loss is not None
        loss_S = self.loss(inputs)
        tokens = len(inputs.hidden_SD)
        if not isinstance(loss_S, torch.Tensor) or loss_S.shape != (tokens,):
            found = (
                list(loss_S.shape) if isinstance(loss_S, torch.Tensor) else type(loss_S).__name__
            )
            raise SlipstreamError(
                f"the loss function '{function_name('loss', self.loss)}' must return one value "
                f"per token, a tensor of shape [{tokens}], but it returned {found}"
            )
        return loss_S

    def figures(self, places_S: torch.Tensor) -> dict[str, float]:
        """Compute the own metrics of all queries."""
        return {name: _figure(name, metric, places_S) for name, metric in self.metrics.items()}


NO_FUNCTIONS = OwnFunctions()


def own_metrics(given: Any) -> dict[str, MetricFunction]:
    """Return metrics by name, given as one function, several, or a dict by name."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        found = {str(name): each for name, each in given.items()}
    else:
        several = [given] if callable(given) or not isinstance(given, Iterable) else list(given)
        found = {function_name("metric", each): each for each in several}
    for name, each in found.items():
        if not callable(each):
            raise SlipstreamError(f"metric '{name}' is {each!r}; give a function of the places")
    return found


def function_name(noun: str, function: Any) -> str:
    """Return the name of a function, by which a run records it."""
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None or name == "<lambda>":
        raise SlipstreamError(
            f"a {noun} is recorded by its name, but {function!r} has none; write it with def"
        )
    return str(name)


def _figure(name: str, metric: MetricFunction, places_S: torch.Tensor) -> float:
    try:
        return float(metric(places_S))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SlipstreamError(
            f"the metric function '{name}' failed ({error}); it takes the places as a tensor and "
            "returns a number"
        ) from error


def _listed(names: Mapping[str, Any]) -> str:
    listed = [f"the loss function '{names['loss']}'"] if "loss" in names else []
    listed += [f"the metric function '{name}'" for name in names.get("metrics", ())]
    return " and ".join(listed) or "no functions"
