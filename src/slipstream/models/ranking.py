"""Ranking: items and actions interleaved; at each item the model predicts the actions that follow.

    item_0 action_0 item_1 action_1 … candidate_0 candidate_1 …

An item token sees the items and actions before it and itself, never its own action. Candidates are
items without an action; each sees the history and itself, so a candidate's score does not depend on
the other candidates. Touch this when the task networks or the action tokens change.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from slipstream.models.backbone import KV
from slipstream.models.gated_attention import EPS, WEIGHT_STD
from slipstream.models.head import SequenceModel
from slipstream.models.inputs import ModelInput
from slipstream.models.model_config import ModelConfig
from slipstream.ops.pointwise import layer_norm


class TaskHeads(nn.Module):
    """A small network for each task, all of them in two matrix products."""

    def __init__(self, dim: int, inner: int, num_tasks: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        self.up = nn.Linear(dim, num_tasks * inner)
        self.down_AF = nn.Parameter(torch.empty(num_tasks, inner))
        self.bias_A = nn.Parameter(torch.zeros(num_tasks))
        for weight in (self.up.weight, self.down_AF):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        inner_TAF = nn.functional.silu(self.up(layer_norm(hidden_TD, eps=EPS))).unflatten(
            1, (self.num_tasks, -1)
        )
        return (inner_TAF * self.down_AF).sum(-1) + self.bias_A


class RankingModel(SequenceModel):
    """Two tokens per behaviour; an action token is a base plus the embeddings of its actions."""

    def __init__(
        self,
        config: ModelConfig,
        tasks: Sequence[str],
        user_features: Sequence[str] = (),
        item_features: Sequence[str] = (),
        joined: Sequence[str] = (),
        widths: Mapping[str, int] | None = None,
    ) -> None:
        if not tasks:
            raise ValueError("a ranking model needs at least one task to predict")
        super().__init__(config, 2, user_features, item_features, 1, joined, widths)
        self.tasks = list(tasks)
        self.actions = nn.Linear(len(self.tasks), config.dim)
        nn.init.normal_(self.actions.weight, std=WEIGHT_STD)
        nn.init.normal_(self.actions.bias, std=WEIGHT_STD)
        self.heads = TaskHeads(config.dim, config.head_dim, len(self.tasks))

    def forward(self, given: ModelInput, past: list[KV] | None = None) -> torch.Tensor:
        """logits_TA: one logit per task at every behaviour and candidate, for its own actions."""
        return self.heads(self.hidden_TD(given, past))

    def actions_TD(self, given: ModelInput) -> torch.Tensor:
        """Action tokens from the labels, which a batch of candidates alone need not have."""
        num_tokens = given.timestamps_T.numel()
        labels_TA = given.labels_TA
        if labels_TA is None:
            if given.num_candidates_B is None or int(given.num_candidates_B.sum()) != num_tokens:
                raise ValueError(
                    "ranking reads the actions of the history: give labels_TA, one column per task"
                )
            labels_TA = self.actions.weight.new_zeros(num_tokens, len(self.tasks))
        if labels_TA.shape != (num_tokens, len(self.tasks)):
            raise ValueError(
                f"labels of shape {tuple(labels_TA.shape)}, but {num_tokens} behaviours and "
                f"{len(self.tasks)} tasks"
            )
        return self.actions(labels_TA.to(self.actions.weight.dtype)) * self.factor
