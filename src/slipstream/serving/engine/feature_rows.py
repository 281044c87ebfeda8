"""The embedding rows a bundle's model reads: of items by row, of users by the codes of features.

A feature with several values is the mean of their rows, exactly as in training. Touch this when a
model reads another kind of feature.
"""

import functools
from collections.abc import Mapping, Sequence

import torch

from slipstream.bundle import Bundle
from slipstream.models.jagged import offsets_from_lengths, segment_mean, take_segments
from slipstream.ops.row_readers import RowReader
from slipstream.serving.engine.cold_items import ColdItems, cold_rows

MEAN_ROWS = 65_536  # of which the mean stands for an item that is not known
UserCodes = Mapping[str, int | tuple[int, ...]]  # by feature; a tuple where it has several values


class FeatureRows:
    """A bundle's tables, with the codes of its items."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self.item = bundle, bundle.rows("item")
        self._tables: dict[str, RowReader] = {}
        self._codes, self._offsets = bundle.part("codes"), bundle.part("offsets")
        self._vectors = bundle.part("vectors")

    def _take(self, table: str, rows_T: torch.Tensor) -> torch.Tensor:
        if table not in self._tables:
            self._tables[table] = self._bundle.rows(table)
        return self._tables[table].take(rows_T)

    def of_items(
        self, rows_T: torch.Tensor, cold: ColdItems | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what each item reads from every item table, and its pretrained vectors.

        Rows behind the catalogue's last are those of `cold` items, which have no vectors.
        """
        if cold is not None:
            return self._with_cold(rows_T, cold)
        found = {"item": self.item.take(rows_T)}
        for name, codes in self._codes.items():
            if name in self._offsets:
                keys_S, offsets_T1 = take_segments(codes, self._offsets[name], rows_T)
                found[f"item.{name}"] = segment_mean(self._take(f"item.{name}", keys_S), offsets_T1)
            else:
                found[f"item.{name}"] = self._take(f"item.{name}", codes[rows_T])
        for name, vectors_ND in self._vectors.items():
            found[f"vector.{name}"] = vectors_ND[rows_T].float()
        return found

    def _with_cold(self, rows_T: torch.Tensor, cold: ColdItems) -> dict[str, torch.Tensor]:
        new_T = rows_T >= self.item.shape[0]
        found = self.of_items(rows_T.masked_fill(new_T, 0))
        places = rows_T[new_T] - self.item.shape[0]
        for name, rows_TD in found.items():
            kind, _, feature = name.partition(".")
            if name == "item":
                rows_TD[new_T] = self.mean_item_D
            elif kind == "vector":
                rows_TD[new_T] = 0
            else:
                take = functools.partial(self._take, name)
                rows_TD[new_T] = cold_rows(take, cold.codes[feature])[places]
        return found

    @functools.cached_property
    def mean_item_D(self) -> torch.Tensor:
        """The mean of the item rows, of evenly spaced ones where there are many."""
        count = self.item.shape[0]
        chosen = torch.linspace(0, count - 1, min(count, MEAN_ROWS), dtype=torch.float64)
        return self.item.take(chosen.round().long()).mean(0)

    def of_context(self, context: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what each behaviour reads from every context table, by the codes of context."""
        return {
            f"context.{name}": self._take(f"context.{name}", codes_T)
            for name, codes_T in context.items()
        }

    def of_users(
        self, features: Sequence[str], users: Sequence[UserCodes]
    ) -> dict[str, torch.Tensor]:
        """Return what each user reads from every user table, [B, D] each."""
        found = {}
        for name in features:
            codes = [user[name] for user in users]
            several = [(each,) if isinstance(each, int) else each for each in codes]
            keys_S = torch.tensor([code for each in several for code in each])
            rows_SD = self._take(f"user.{name}", keys_S)
            if any(isinstance(each, tuple) for each in codes):
                lengths_B = torch.tensor([len(each) for each in several])
                rows_SD = segment_mean(rows_SD, offsets_from_lengths(lengths_B))
            found[f"user.{name}"] = rows_SD
        return found
