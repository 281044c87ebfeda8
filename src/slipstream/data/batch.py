"""The one batch type: jagged, int64 ids, nothing padded."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class JaggedBatch:
    """Windows of B users' behaviours laid end to end: T behaviours in all.

    User b owns the behaviours `offsets_B1[b]:offsets_B1[b + 1]`, oldest first. Token t stands for a
    behaviour the model may read; `next_items_T[t]` is the behaviour that followed it (the retrieval
    target) and -1 where none is known. `supervised_T` marks where the loss or the metric counts:
    everywhere in training, only at held-out behaviours in evaluation. For retrieval it marks token
    t whose *next* item is asked for; for ranking it marks token t whose *own* actions are asked
    for.
    """

    sample_ids_B: torch.Tensor  # int64, row of the user in the store
    first_positions_B: (
        torch.Tensor
    )  # int64, place of the window's first behaviour in the user's whole log
    offsets_B1: torch.Tensor  # int64, 0 … T
    items_T: torch.Tensor  # int64, rows of the item vocabulary
    timestamps_T: torch.Tensor  # int64, seconds
    next_items_T: torch.Tensor  # int64, -1 where there is none
    next_timestamps_T: (
        torch.Tensor
    )  # int64; repeats the own timestamp where there is no next behaviour
    supervised_T: torch.Tensor  # bool
    actions: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> float32 [T]
    user_features: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> int64 codes [B]

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
        """A name for each token that survives re-batching: (user, place in the log). Counter-based
        randomness hangs on it.
        """
        places_T = torch.arange(self.num_tokens, device=self.offsets_B1.device) - self.offsets_B1[
            :-1
        ].repeat_interleave(self.lengths_B)
        places_T = places_T + self.first_positions_B.repeat_interleave(self.lengths_B)
        return self.sample_ids_B.repeat_interleave(self.lengths_B) * (1 << 24) + places_T

    def take(self, users_C: torch.Tensor) -> "JaggedBatch":
        """Some users as a batch of their own; their tokens keep their names."""
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
            user_features={name: value_B[users_C] for name, value_B in self.user_features.items()},
            **{name: getattr(self, name)[source_T] for name in by_token},
        )

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "JaggedBatch":
        """The same batch with every tensor moved."""

        def all_of(value: Any) -> Any:
            return (
                {name: move(part) for name, part in value.items()}
                if isinstance(value, dict)
                else move(value)
            )

        return replace(
            self, **{each.name: all_of(getattr(self, each.name)) for each in fields(self)}
        )

    def to(self, device: torch.device | str) -> "JaggedBatch":
        """The same batch on another device."""
        return self.moved(lambda tensor: tensor.to(device))
