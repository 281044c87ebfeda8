"""The ML-1M HSTU training step in plain padded PyTorch, after the public research recipe.

The jagged step is measured against it. Every tensor is [B, N, …] with N the longest history. The
time bias is a [B, N, N] tensor built from bucketed time differences, the position bias an [N, N]
one, the attention scores are [B, H, N, N]. Each position gathers its own negatives and normalises
them after the gather: [B, N, R, D]. Only torch's own operators, dense gradients for the item table,
AdamW over everything.

`loss_at="real"` leaves padding out of the loss, as the research recipe does; `"all"` keeps it
there. Touch this when the shipped recipe computes something else.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.data.batch import JaggedBatch
from slipstream.models.model_config import ModelConfig
from slipstream.training.features import ITEM
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender

LossAt = Literal["all", "real"]
_EPS = 1e-6


@dataclass(frozen=True)
class PaddedBatch:
    """A batch as rectangles; `valid_BN` is true where there is a behaviour."""

    items_BN: torch.Tensor
    times_BN: torch.Tensor
    next_times_BN: torch.Tensor
    targets_BN: torch.Tensor
    valid_BN: torch.Tensor

    @classmethod
    def of(cls, batch: JaggedBatch, length: int) -> "PaddedBatch":
        """Pad a batch with zeros at the end up to `length`."""
        valid_BN = torch.arange(length) < batch.lengths_B[:, None]

        def pad(value_T: torch.Tensor) -> torch.Tensor:
            return torch.zeros(valid_BN.shape, dtype=value_T.dtype).masked_scatter_(
                valid_BN, value_T
            )

        return cls(
            pad(batch.items_T),
            pad(batch.timestamps_T),
            pad(batch.next_timestamps_T),
            pad(batch.next_items_T.clamp(min=0)),
            valid_BN,
        )


class PaddedBlock(nn.Module):
    """One HSTU block over rectangles."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.heads * (2 * config.dv + 2 * config.dqk)
        self.uvqk_DF = nn.Parameter(torch.empty(config.dim, width).normal_(std=0.02))
        self.output = nn.Linear(config.heads * config.dv, config.dim)
        self.position_P = nn.Parameter(torch.empty(2 * config.max_len - 1).normal_(std=0.02))
        self.time_W = nn.Parameter(torch.empty(config.time_buckets + 1).normal_(std=0.02))

    def forward(
        self,
        x_BND: torch.Tensor,
        bucket_BNN: torch.Tensor,
        place_NN: torch.Tensor,
        seen_BNN: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        heads, value, key = config.heads, config.heads * config.dv, config.heads * config.dqk
        normed_BND = F.layer_norm(x_BND, (config.dim,), eps=_EPS)
        u, v, q, k = F.silu(normed_BND @ self.uvqk_DF).split([value, value, key, key], dim=-1)
        q_BHNK, k_BHNK, v_BHNV = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v)
        )
        scores_BHNN = q_BHNK @ k_BHNK.transpose(2, 3) * (config.scale or 1.0)
        bias_BNN = self.position_P[place_NN] + self.time_W[bucket_BNN.view(-1)].view(
            bucket_BNN.shape
        )
        weights_BHNN = (
            F.silu(scores_BHNN + bias_BNN.unsqueeze(1))
            / (config.divisor or config.max_len)
            * seen_BNN.unsqueeze(1)
        )
        attended_BNF = (weights_BHNN @ v_BHNV).transpose(1, 2).flatten(2)
        gated_BNF = u * F.layer_norm(attended_BNF, (value,), eps=_EPS)
        return x_BND + self.output(F.dropout(gated_BNF, config.dropout, self.training))


class PaddedHSTU(nn.Module):
    """Embeddings, positions, blocks and the sampled softmax of one recipe."""

    def __init__(self, recipe: Recipe, num_items: int) -> None:
        super().__init__()
        self.recipe, config = recipe, recipe.model
        self.items = nn.Embedding(num_items, config.dim)
        self.positions_ND = nn.Parameter(
            torch.empty(config.max_len, config.dim).normal_(std=config.dim**-0.5)
        )
        self.blocks = nn.ModuleList([PaddedBlock(config) for _ in range(config.blocks)])

    @torch.no_grad()
    def copy_weights(self, ours: Recommender) -> None:
        """Copy the weights of a jagged recommender of the same recipe."""
        backbone = ours.model.get_submodule("backbone")
        weights = dict(backbone.named_parameters())
        self.items.weight.copy_(ours.tables[ITEM].all_rows())
        self.positions_ND.copy_(weights["positions_PD"])
        for number, block in enumerate(self.blocks):
            layer = f"layers.{number}"
            block.get_parameter("uvqk_DF").copy_(weights[f"{layer}.uvqk_FD"].T)
            block.get_parameter("output.weight").copy_(weights[f"{layer}.output.weight"])
            block.get_parameter("output.bias").copy_(weights[f"{layer}.output.bias"])
            block.get_parameter("position_P").copy_(weights[f"{layer}.relative.position_P"])
            block.get_parameter("time_W").copy_(weights[f"{layer}.relative.time_W"])

    def forward(self, batch: PaddedBatch) -> torch.Tensor:
        config, length = self.recipe.model, batch.items_BN.shape[1]
        x_BND = self.items(batch.items_BN) * config.dim**0.5 + self.positions_ND[:length]
        x_BND = F.dropout(x_BND, config.input_dropout, self.training) * batch.valid_BN.unsqueeze(-1)
        looks_from_BN = batch.next_times_BN if config.time_bias == "next" else batch.times_BN
        distance_BNN = (looks_from_BN.unsqueeze(2) - batch.times_BN.unsqueeze(1)).abs().clamp(min=1)
        bucket_BNN = (distance_BNN.double().log() / 0.301).long().clamp(max=config.time_buckets)
        at_N = torch.arange(length)
        place_NN = at_N.unsqueeze(1) - at_N + config.max_len - 1
        seen_BNN = (at_N.unsqueeze(1) >= at_N) & batch.valid_BN.unsqueeze(1)
        for block in self.blocks:
            x_BND = block(x_BND, bucket_BNN, place_NN, seen_BNN)
        return x_BND

    def loss_sum(
        self, batch: PaddedBatch, negatives_BNR: torch.Tensor | None = None, loss_at: LossAt = "all"
    ) -> torch.Tensor:
        """Sum the sampled softmax over real positions; negatives are drawn unless given."""
        config = self.recipe.loss
        hidden, targets, kept = self(batch), batch.targets_BN, batch.valid_BN
        if loss_at == "real":
            hidden, targets = hidden[kept], targets[kept]
            negatives_BNR = None if negatives_BNR is None else negatives_BNR[kept]
        if negatives_BNR is None:
            negatives_BNR = torch.randint(
                self.items.num_embeddings, (*targets.shape, config.negatives)
            )
        query = F.normalize(hidden, dim=-1, eps=_EPS)
        positive = (query * F.normalize(self.items(targets), dim=-1, eps=_EPS)).sum(
            -1, keepdim=True
        ) / config.temperature
        rows = F.normalize(self.items(negatives_BNR), dim=-1, eps=_EPS)
        negative = (rows @ query.unsqueeze(-1)).squeeze(-1) / config.temperature
        negative = negative.masked_fill(negatives_BNR == targets.unsqueeze(-1), float("-inf"))
        loss = torch.cat([positive, negative], dim=-1).logsumexp(-1) - positive.squeeze(-1)
        return loss.sum() if loss_at == "real" else (loss * kept).sum()


class PaddedStep:
    """The whole step: forward, loss, backward, AdamW over the dense part and the item table."""

    def __init__(self, recipe: Recipe, num_items: int, loss_at: LossAt = "all") -> None:
        self.model, self.loss_at = PaddedHSTU(recipe, num_items).train(), loss_at
        optimizer = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )

    def __call__(self, batch: PaddedBatch) -> float:
        loss = self.model.loss_sum(batch, loss_at=self.loss_at)
        (loss / batch.valid_BN.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
