"""The keys of a batch: which row of which table each behaviour and user reads.

Tables are named after what they embed: `item`, `item.<feature>`, `user.<feature>`. `Features` holds
all a model must know of the data it was built for (sizes, codes of item features), so it can be
made from a store or from an exported bundle. Touch this when a model gets another kind of feature.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.recipe import Recipe

ITEM = "item"


@dataclass(frozen=True)
class Features:
    """Sizes of the tables and codes of the items' categorical columns."""

    num_items: int
    item_codes: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # feature -> int64 [num_items]
    item_cardinalities: dict[str, int] = field(default_factory=dict)
    user_cardinalities: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_store(cls, recipe: Recipe, store: SequenceStore) -> "Features":
        """Look up the features a recipe names in a store; an unknown name is the user's error."""
        _require("item feature", recipe.item_features, store.item_features)
        _require("user feature", recipe.user_features, store.user_features)
        _require("action column", [task.column for task in recipe.tasks.values()], store.actions)
        if store.num_items < 2:
            raise SlipstreamError(
                f"training needs at least two different items, but {store.directory} holds "
                f"{store.num_items}"
            )
        return cls(
            store.num_items,
            {
                name: torch.tensor(store.item_features[name].codes, dtype=torch.int64)
                for name in recipe.item_features
            },
            {name: store.item_features[name].cardinality for name in recipe.item_features},
            {name: store.user_features[name].cardinality for name in recipe.user_features},
        )

    def table_sizes(self) -> dict[str, int]:
        """Return the rows of each table, by the table's name."""
        sizes = {ITEM: self.num_items}
        sizes |= {
            f"item.{name}": cardinality for name, cardinality in self.item_cardinalities.items()
        }
        return sizes | {
            f"user.{name}": cardinality for name, cardinality in self.user_cardinalities.items()
        }

    def input_keys(self, batch: JaggedBatch) -> dict[str, torch.Tensor]:
        """Return the key each behaviour (or user) of the batch reads from each table."""
        keys = {ITEM: batch.items_T}
        keys |= {
            f"item.{name}": codes_N[batch.items_T] for name, codes_N in self.item_codes.items()
        }
        return keys | {
            f"user.{name}": batch.user_features[name].to(torch.int64)
            for name in self.user_cardinalities
        }


def labels_TA(recipe: Recipe, batch: JaggedBatch, dtype: torch.dtype) -> torch.Tensor:
    """Return the actions that happened: 1 where a task's column reached its threshold."""
    columns = [batch.actions[task.column] >= task.threshold for task in recipe.tasks.values()]
    return torch.stack(columns, dim=1).to(dtype)


def _require(noun: str, names: Iterable[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) if known else "; the store has none"
            raise SlipstreamError(f"the store has no {noun} '{name}'{hint}")
