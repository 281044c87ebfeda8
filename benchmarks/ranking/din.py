"""DIN ("Deep Interest Network for Click-Through Rate Prediction", KDD 2018) in plain PyTorch.

It reads the impressions of a store, with the columns that a ranking recipe names. Touch this when
the peer should be stronger; the protocol describes it.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.data.store import Feature, SequenceStore
from slipstream.training import metrics
from slipstream.training.recipe import Recipe

BATCH, LEARNING_RATE, PATIENCE, EPOCHS = 1_024, 1e-3, 2, 10


@dataclass(frozen=True)
class Impressions:
    """The log as tables of rows: what happened, to whom, which rows train, validate and test."""

    items_N: Tensor
    users_N: Tensor
    starts_N: Tensor  # the first row of the impression's user
    labels_NA: Tensor
    parts: dict[str, Tensor]  # rows by part

    @classmethod
    def of(cls, store: SequenceStore, recipe: Recipe) -> "Impressions":
        """Read a store by the recipe's split and signals."""
        starts_U = np.asarray(store.offsets_U1[:-1], dtype=np.int64)
        lengths_U = np.asarray(store.lengths_U)
        users_N = np.repeat(np.arange(store.num_users), lengths_U)
        place_N = np.arange(len(users_N)) - starts_U[users_N]
        chosen = {"train": place_N < recipe.split.train_lengths(store)[users_N]}
        for which in ("validation", "test"):
            begins_U, ends_U = recipe.split.held_out(store, which)
            chosen[which] = (begins_U[users_N] <= place_N) & (place_N < ends_U[users_N])
        labels = [
            np.asarray(store.actions[task.column]) >= task.threshold
            for task in recipe.tasks.values()
        ]
        return cls(
            torch.from_numpy(np.array(store.items_N, dtype=np.int64)),
            torch.from_numpy(users_N),
            torch.from_numpy(starts_U[users_N]),
            torch.from_numpy(np.stack(labels, axis=1).astype(np.float32)),
            {name: torch.from_numpy(np.flatnonzero(mask)) for name, mask in chosen.items()},
        )

    def history_SL(self, rows_S: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the rows before each impression, newest first, and which of them are the user's.

        No row is older than the oldest that any of these impressions has.
        """
        longest = int((rows_S - self.starts_N[rows_S]).max().clamp(1, length))
        before_SL = rows_S[:, None] - torch.arange(1, longest + 1)
        return before_SL.clamp(min=0), before_SL >= self.starts_N[rows_S][:, None]


class FeatureEmbedding(nn.Module):
    """The vector of a vocabulary row's category, or the mean over its categories."""

    codes_VW: Tensor

    def __init__(self, feature: Feature, dim: int) -> None:
        super().__init__()
        if feature.kind == "number":
            raise ValueError("DIN here reads categories only")
        offsets = feature.offsets_V1
        codes = np.split(feature.codes, offsets[1:-1]) if offsets is not None else feature.codes
        width = max((len(each) for each in codes), default=1) if offsets is not None else 1
        table_VW = np.zeros((len(codes), max(1, width)), dtype=np.int64)  # 0: unknown
        for row, each in enumerate(codes):
            several = np.atleast_1d(each)
            table_VW[row, : len(several)] = several
        self.register_buffer("codes_VW", torch.from_numpy(table_VW))
        self.rows = nn.EmbeddingBag(feature.cardinality + 1, dim, mode="mean", padding_idx=0)

    def forward(self, rows: Tensor) -> Tensor:
        codes = self.codes_VW[rows]
        found: Tensor = self.rows(codes.flatten(0, -2))
        return found.unflatten(0, rows.shape)


class DIN(nn.Module):
    """Sums the history by how much each impression of it matters for the candidate."""

    def __init__(self, store: SequenceStore, recipe: Recipe) -> None:
        super().__init__()
        dim, signals = recipe.model.dim, len(recipe.tasks)
        self.length = recipe.sampler.max_len
        self.item = nn.Embedding(store.num_items, dim)
        self.item_features = nn.ModuleList(
            FeatureEmbedding(store.item_features[name], dim) for name in recipe.item_features
        )
        self.user_features = nn.ModuleList(
            FeatureEmbedding(store.user_features[name], dim) for name in recipe.user_features
        )
        nn.init.normal_(self.item.weight, std=0.01)
        wide = dim * (1 + len(self.item_features))
        self.signals = nn.Linear(signals, wide, bias=False)
        self.unit = _layers(4 * wide, 80, 40, 1)
        self.top = _layers(3 * wide + dim * len(self.user_features), 200, 80, signals)

    def describe(self, items: Tensor) -> Tensor:
        """Return the vectors of items with their features."""
        return torch.cat([self.item(items), *(each(items) for each in self.item_features)], dim=-1)

    def forward(self, log: Impressions, rows_S: Tensor) -> Tensor:
        """Return a logit for each impression and signal."""
        history_SL, known_SL = log.history_SL(rows_S, self.length)
        candidate_SW = self.describe(log.items_N[rows_S])
        past_SLW = self.describe(log.items_N[history_SL]) + self.signals(log.labels_NA[history_SL])
        other_SLW = candidate_SW[:, None].expand_as(past_SLW)
        pair_SLP = torch.cat(
            [past_SLW, other_SLW, other_SLW - past_SLW, past_SLW * other_SLW], dim=2
        )
        weights_SL = torch.sigmoid(self.unit(pair_SLP).squeeze(2)) * known_SL
        interest_SW = (weights_SL[:, :, None] * past_SLW).sum(1)
        users_S = log.users_N[rows_S]
        known = [candidate_SW, interest_SW, interest_SW * candidate_SW]
        scores: Tensor = self.top(torch.cat([*known, *(f(users_S) for f in self.user_features)], 1))
        return scores


def _layers(*widths: int) -> nn.Sequential:
    """Return linear layers with PReLU between them."""
    made: list[nn.Module] = []
    for before, after in pairwise(widths):
        made += [nn.Linear(before, after), nn.PReLU()]
    return nn.Sequential(*made[:-1])


@torch.no_grad()
def evaluate(model: DIN, log: Impressions, part: str, tasks: list[str]) -> dict[str, float]:
    """Return AUC and GAUC of every signal, and their means, as `Run.evaluate` names them."""
    model.eval()
    rows_S = log.parts[part]
    scores_SA = torch.cat([model(log, rows) for rows in rows_S.split(BATCH)])
    labels_SA, users_S = log.labels_NA[rows_S], log.users_N[rows_S]
    found: dict[str, float] = {}
    for column, task in enumerate(tasks):
        pair = scores_SA[:, column], labels_SA[:, column]
        found[f"AUC/{task}"] = metrics.area_under_curve(*pair)
        found[f"GAUC/{task}"] = metrics.grouped_area_under_curve(*pair, users_S)
    for kind in ("AUC", "GAUC"):
        values = [found[f"{kind}/{task}"] for task in tasks]
        found[kind] = float(np.nanmean(values))
    return {**found, "behaviours": float(len(rows_S))}


def train_din(store: SequenceStore, recipe: Recipe, seed: int, epochs: int) -> dict[str, Any]:
    """Train DIN, choose the epoch by validation, return its test figures."""
    torch.manual_seed(seed)
    log, tasks = Impressions.of(store, recipe), list(recipe.tasks)
    model = DIN(store, recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    begun, best, best_epoch, weights, epoch = time.perf_counter(), -1.0, 0, model.state_dict(), 0
    while epoch < epochs and epoch - best_epoch < PATIENCE:
        epoch += 1
        model.train()
        train_R = log.parts["train"]
        for rows_S in train_R[torch.randperm(len(train_R))].split(BATCH):
            logits_SA = model(log, rows_S)
            loss = functional.binary_cross_entropy_with_logits(logits_SA, log.labels_NA[rows_S])
            optimizer.zero_grad(set_to_none=True)
            (loss * len(tasks)).backward()
            optimizer.step()
        found = evaluate(model, log, "validation", tasks)["AUC"]
        if found > best:
            best, best_epoch = found, epoch
            weights = {name: value.clone() for name, value in model.state_dict().items()}
    seconds = time.perf_counter() - begun
    model.load_state_dict(weights)
    figures = evaluate(model, log, "test", tasks)
    return {"test": figures, "epochs": epoch, "best_epoch": best_epoch, "seconds": seconds}
