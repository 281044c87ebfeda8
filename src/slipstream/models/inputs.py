"""What a model is given: embedding rows already looked up, and the layout of the jagged tokens they
belong to.

Models know neither tables nor batches, so the same code trains, ranks from a cached prefix and
serves.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Layout:
    """Where each sequence's tokens are, when they happened, and who may see whom.

    With a cached prefix `offsets_B1` describes only the new tokens, `past_lengths_B` how many came
    before them in each sequence. The last `num_candidates_B[b]` tokens of sequence b are
    candidates: each sees the history and itself, and all of them stand at the position just after
    the history.
    """

    offsets_B1: torch.Tensor  # int64, 0 … T, the tokens handed in
    timestamps_T: (
        torch.Tensor
    )  # int64, when each token happened: what later tokens measure their distance to
    query_timestamps_T: (
        torch.Tensor
    )  # int64, from when each token looks back: its own time, or the next behaviour's
    token_ids_T: torch.Tensor  # int64 names for counter-based dropout
    dropout_seed: int | None = None  # None: no dropout (evaluation, serving)
    past_lengths_B: torch.Tensor | None = None  # int64
    num_candidates_B: torch.Tensor | None = None  # int64


@dataclass(frozen=True)
class ModelInput:
    """One batch of behaviours as a head sees them, before it lays out its own token stream.

    `rows` holds looked-up embeddings by feature name: "item" and "item.<feature>" are [T, D], one
    row per behaviour; "user.<feature>" are [B, D], one row per user.
    """

    rows: dict[str, torch.Tensor]
    offsets_B1: torch.Tensor
    timestamps_T: torch.Tensor
    next_timestamps_T: torch.Tensor
    token_ids_T: torch.Tensor
    labels_TA: torch.Tensor | None = (
        None  # float {0, 1}, one column per ranking task; the actions that really happened
    )
    num_candidates_B: torch.Tensor | None = (
        None  # the last behaviours of each user are candidates without actions
    )
    dropout_seed: int | None = None
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
