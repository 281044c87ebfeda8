"""The input of a model: embedding rows already looked up, and the layout of their jagged tokens.

Models know neither tables nor batches, so the same code trains, ranks from a cached prefix and
serves. Touch this when a model reads something new.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Where each sequence's tokens are, when they happened, and who may see whom.

    With a cached prefix `offsets_B1` describes only the new tokens. The last `num_candidates_B[b]`
    tokens of sequence b are candidates: each sees the history and itself, and all of them stand at
    the position after the history.
    """

    offsets_B1: torch.Tensor  # int64, 0 … T
    timestamps_T: torch.Tensor  # int64, when each token happened
    query_timestamps_T: torch.Tensor  # int64, when each token looks back: then, or at the next one
    token_ids_T: torch.Tensor  # int64, from which dropout masks are drawn
    dropout_seed: int | None = None  # None: no dropout (evaluation, serving)
    num_candidates_B: torch.Tensor | None = None  # int64


@dataclass(frozen=True)
class ModelInput:
    """One batch of behaviours, before a model lays out its token stream.

    `rows` holds looked-up embeddings by feature name: "item" and "item.<feature>" are [T, D], one
    row per behaviour; "user.<feature>" are [B, D], one row per user. A model may be built for rows
    of another width than D under some of the names.
    """

    rows: dict[str, torch.Tensor]
    offsets_B1: torch.Tensor
    timestamps_T: torch.Tensor
    next_timestamps_T: torch.Tensor
    token_ids_T: torch.Tensor
    labels_TA: torch.Tensor | None = None  # float {0, 1}, one column per task: the actions
    num_candidates_B: torch.Tensor | None = None  # how many last behaviours are candidates
    dropout_seed: int | None = None
