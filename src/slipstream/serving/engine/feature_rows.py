"""The embedding rows a bundle's model reads: of items by row, of users by the codes of features.

A feature with several values is the mean of their rows, exactly as in training. Touch this when a
model reads another kind of feature.
"""

from collections.abc import Mapping, Sequence

import torch

from slipstream.bundle import Bundle
from slipstream.models.jagged import offsets_from_lengths, segment_mean, take_segments

UserCodes = Mapping[str, int | tuple[int, ...]]  # by feature; a tuple where it has several values


class FeatureRows:
    """A bundle's tables, with the codes of its items."""

    def __init__(self, bundle: Bundle) -> None:
        self.tables = bundle.part("tables")
        self._codes, self._offsets = bundle.part("codes"), bundle.part("offsets")

    def of_items(self, rows_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what each item reads from every item table, [T, D] each."""
        found = {"item": self.tables["item"][rows_T]}
        for name, codes in self._codes.items():
            table_UD = self.tables[f"item.{name}"]
            if name in self._offsets:
                keys_S, offsets_T1 = take_segments(codes, self._offsets[name], rows_T)
                found[f"item.{name}"] = segment_mean(table_UD[keys_S], offsets_T1)
            else:
                found[f"item.{name}"] = table_UD[codes[rows_T]]
        return found

    def of_users(
        self, features: Sequence[str], users: Sequence[UserCodes]
    ) -> dict[str, torch.Tensor]:
        """Return what each user reads from every user table, [B, D] each."""
        found = {}
        for name in features:
            table_UD, codes = self.tables[f"user.{name}"], [user[name] for user in users]
            several = [(each,) if isinstance(each, int) else each for each in codes]
            keys_S = torch.tensor([code for each in several for code in each])
            rows_SD = table_UD[keys_S]
            if any(isinstance(each, tuple) for each in codes):
                lengths_B = torch.tensor([len(each) for each in several])
                rows_SD = segment_mean(rows_SD, offsets_from_lengths(lengths_B))
            found[f"user.{name}"] = rows_SD
        return found
