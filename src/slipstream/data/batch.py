"""The one batch type: jagged, int64 ids, nothing padded. Touch this when a batch holds more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class JaggedBatch:
    """Windows of the behaviours of B users, one after the other: T behaviours in all.

    User b has the behaviours `offsets_B1[b]:offsets_B1[b + 1]`, oldest first. Token t is a
    behaviour the model may read; `next_items_T[t]` is the item that followed it (the retrieval
    target), -1 where none is known. `supervised_T` marks where the loss or the metric counts:
    everywhere in training, only at held-out behaviours in evaluation. For retrieval it marks a
    token whose *next* item is predicted, for ranking one whose *own* actions are.
    """

    sample_ids_B: torch.Tensor  # int64, row of the user in the store; -1: not there
    first_positions_B: torch.Tensor  # int64, place of the first behaviour in the user's whole log
    offsets_B1: torch.Tensor  # int64, 0 … T
    items_T: torch.Tensor  # int64, rows of the item vocabulary
    timestamps_T: torch.Tensor  # int64, seconds
    next_items_T: torch.Tensor  # int64, -1 where there is none
    next_timestamps_T: torch.Tensor  # int64, the own timestamp where there is no next behaviour
    supervised_T: torch.Tensor  # bool
    actions: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> float32 [T]
    context: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> int64 codes [T]
    # Name -> int64 codes [B] of the features with one category a user; others: by sample_ids_B.
    user_features: dict[str, torch.Tensor] = field(default_factory=dict)
    # Targets of the whole global batch, in its order, where negatives are drawn from them.
    global_targets_P: torch.Tensor | None = None

    @property
    def num_users(self) -> int:
        return self.sample_ids_B.numel()

    @property
    def num_tokens(self) -> int:
        return self.items_T.numel()

    @property
    def lengths_B(self) -> torch.Tensor:
        return self.offsets_B1.diff()

    @property
    def token_ids_T(self) -> torch.Tensor:
        """Number each token by (user, place in the log): the same number in every batch.

        Counter-based randomness uses these numbers.
        """
        starts_T = self.offsets_B1[:-1].repeat_interleave(self.lengths_B)
        places_T = torch.arange(self.num_tokens, device=self.offsets_B1.device) - starts_T
        places_T = places_T + self.first_positions_B.repeat_interleave(self.lengths_B)
        return self.sample_ids_B.repeat_interleave(self.lengths_B) * (1 << 24) + places_T

    def take(self, users_C: torch.Tensor) -> "JaggedBatch":
        """Make a batch of some users; their tokens keep their numbers."""
        lengths_C = self.lengths_B[users_C]
        offsets_C1 = torch.nn.functional.pad(lengths_C.cumsum(0), (1, 0))
        source_T = torch.arange(int(offsets_C1[-1])) + (
            self.offsets_B1[users_C] - offsets_C1[:-1]
        ).repeat_interleave(lengths_C)
        by_token = ("items_T", "timestamps_T", "next_items_T", "next_timestamps_T", "supervised_T")
        return JaggedBatch(
            sample_ids_B=self.sample_ids_B[users_C],
            first_positions_B=self.first_positions_B[users_C],
            offsets_B1=offsets_C1,
            actions={name: value_T[source_T] for name, value_T in self.actions.items()},
            context={name: value_T[source_T] for name, value_T in self.context.items()},
            user_features={name: value_B[users_C] for name, value_B in self.user_features.items()},
            global_targets_P=self.global_targets_P,
            **{name: getattr(self, name)[source_T] for name in by_token},
        )

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "JaggedBatch":
        """Make the same batch with `change` applied to every tensor."""

        def change_all(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(part) for name, part in value.items()}
            return None if value is None else change(value)

        return replace(self, **{f.name: change_all(getattr(self, f.name)) for f in fields(self)})

    def to(self, device: torch.device | str) -> "JaggedBatch":
        """Copy the batch to another device."""
        return self.map_tensors(lambda tensor: tensor.to(device))


def merge_batches(batches: Sequence[JaggedBatch]) -> JaggedBatch:
    """Make one batch of all users of several batches, in their order."""
    if len(batches) == 1:
        return batches[0]

    def join(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        if isinstance(parts[0], dict):
            return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return None if parts[0] is None else torch.cat(parts)

    joined = {f.name: join(f.name) for f in fields(JaggedBatch)}
    lengths_B = torch.cat([batch.lengths_B for batch in batches])
    return JaggedBatch(
        **{**joined, "offsets_B1": torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))}
    )
