"""The keys of a batch: which rows of which table each behaviour and user reads.

Tables are named after what they embed: `item`, `item.<feature>`, `user.<feature>`,
`context.<column>`. `Features` holds all a model must know of the data it was built for (sizes,
codes, edges of numbers), so it can be made from a store or from an exported bundle. A feature is
one category, several categories (whose rows are averaged), or a number (binned, then one category).
Context is one category, whose code comes with the behaviour. Touch this when a model gets another
kind of feature.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import Feature, SequenceStore
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.models.jagged import offsets_from_lengths, take_segments
from slipstream.models.number_bins import bin_count, bin_numbers, log_edges, quantile_edges
from slipstream.training.negatives import training_counts
from slipstream.training.recipe import Recipe

ITEM = "item"
CONTEXT_TABLE = "context."  # before the name of a context column
VECTOR = "vector."  # before the name of pretrained vectors, as an input of a model
NumberEdges = Mapping[str, Sequence[float]]  # by table: between the bins of a number


@dataclass(frozen=True)
class FeatureCodes:
    """The codes of one feature for every row of a vocabulary, and what they mean."""

    codes: torch.Tensor  # int64: one per row; with offsets, all values of all rows
    cardinality: int  # number of codes, 0 ("unknown") included
    kind: Literal["category", "categories", "number"] = "category"
    offsets_V1: torch.Tensor | None = None  # categories: where each row's values begin
    edges: tuple[float, ...] = ()  # number: between its bins

    @classmethod
    def of(
        cls,
        feature: Feature,
        trained_V: np.ndarray,
        recipe: Recipe,
        edges: Sequence[float] | None = None,
    ) -> "FeatureCodes":
        """Encode a store's column; unless given, bins of numbers come from the rows that train."""
        if feature.kind == "number":
            assert feature.values is not None
            if edges is None:
                edges = _find_edges(feature.values[trained_V], recipe)
            codes = torch.from_numpy(bin_numbers(feature.values, edges))
            return cls(codes, bin_count(edges), "number", edges=tuple(edges))
        if feature.kind == "category":
            return cls(torch.tensor(feature.codes, dtype=torch.int64), feature.cardinality)
        assert feature.offsets_V1 is not None
        codes, offsets_V1 = _codes_by_row(feature.codes, feature.offsets_V1, feature.cardinality)
        return cls(codes, feature.cardinality, "categories", offsets_V1)

    def take(self, rows_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the codes of some rows; with several a row, also where each one's begin."""
        if self.offsets_V1 is None:
            return self.codes[rows_T], None
        return take_segments(self.codes, self.offsets_V1, rows_T)

    def with_unknown(self) -> "FeatureCodes":
        """Return these codes with one more row at the end, of which nothing is known."""
        codes, offsets_V1 = torch.cat([self.codes, self.codes.new_zeros(1)]), self.offsets_V1
        if offsets_V1 is not None:
            offsets_V1 = torch.cat([offsets_V1, offsets_V1[-1:] + 1])
        return replace(self, codes=codes, offsets_V1=offsets_V1)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary."""
        return len(self.codes) if self.offsets_V1 is None else len(self.offsets_V1) - 1


class InputKeys(NamedTuple):
    """The keys that behaviours and users read, by table; offsets only where one reads several."""

    keys: dict[str, torch.Tensor]
    offsets: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Features:
    """Sizes of the tables, and the codes of items and users by feature."""

    num_items: int
    item_features: dict[str, FeatureCodes] = field(default_factory=dict)
    user_features: dict[str, FeatureCodes] = field(default_factory=dict)  # and one unknown user
    item_vectors: dict[str, np.ndarray] = field(default_factory=dict)  # mapped, a row per item
    context: dict[str, int] = field(default_factory=dict)  # number of codes, 0 ("unknown") included

    @classmethod
    def from_store(
        cls, recipe: Recipe, store: SequenceStore, edges: NumberEdges | None = None
    ) -> "Features":
        """Look up the features a recipe names in a store; an unknown name is the user's error.

        `edges` are those of a run that goes on, between the bins of its numbers.
        """
        _require("item feature", recipe.item_features, store.item_features)
        _require("user feature", recipe.user_features, store.user_features)
        _require("item vectors", recipe.item_vectors, store.item_vectors)
        _require("context column", recipe.context_features, store.context)
        _require("action column", [task.column for task in recipe.tasks.values()], store.actions)
        if store.num_items < 2:
            raise SlipstreamError(
                f"training needs at least two different items, but {store.directory} holds "
                f"{store.num_items}"
            )
        items = {name: store.item_features[name] for name in recipe.item_features}
        users = {name: store.user_features[name] for name in recipe.user_features}
        lengths_U = recipe.split.train_lengths(store)
        trained_N = np.zeros(0, dtype=bool)
        if any(feature.kind == "number" for feature in items.values()):
            counts_N = training_counts(store.items_N, store.offsets_U1, store.num_items, lengths_U)
            trained_N = counts_N > 0
        kept = edges or {}

        def codes(table: str, feature: Feature, trained_V: np.ndarray) -> FeatureCodes:
            return FeatureCodes.of(feature, trained_V, recipe, kept.get(table))

        return cls(
            store.num_items,
            {name: codes(f"item.{name}", each, trained_N) for name, each in items.items()},
            {
                name: codes(f"user.{name}", each, lengths_U > 0).with_unknown()
                for name, each in users.items()
            },
            {name: store.item_vectors[name] for name in recipe.item_vectors},
            {name: store.context[name].cardinality for name in recipe.context_features},
        )

    @property
    def joined(self) -> tuple[str, ...]:
        """The inputs that join a behaviour's token besides the item's row and features."""
        return (*self.vector_widths(), *(f"{CONTEXT_TABLE}{name}" for name in self.context))

    def vector_widths(self) -> dict[str, int]:
        """Return the width of every pretrained vector, by the name of the model's input."""
        return {f"{VECTOR}{name}": each.shape[1] for name, each in self.item_vectors.items()}

    def input_vectors(self, batch: JaggedBatch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the pretrained vectors of each behaviour's item; they are not trained."""
        rows_T = batch.items_T.numpy()
        return {
            f"{VECTOR}{name}": torch.from_numpy(vectors_ND[rows_T]).to(dtype)
            for name, vectors_ND in self.item_vectors.items()
        }

    def number_edges(self) -> dict[str, list[float]]:
        """Return the edges between the bins of numbers, by table."""
        return {
            table: list(each.edges)
            for table, each in self.by_table().items()
            if each.kind == "number"
        }

    def by_table(self) -> dict[str, FeatureCodes]:
        """Return every feature by the name of its table."""
        items = {f"item.{name}": each for name, each in self.item_features.items()}
        return items | {f"user.{name}": each for name, each in self.user_features.items()}

    def table_sizes(self) -> dict[str, int]:
        """Return the rows of each table, by the table's name."""
        sizes = {table: each.cardinality for table, each in self.by_table().items()}
        context = {f"{CONTEXT_TABLE}{name}": count for name, count in self.context.items()}
        return {ITEM: self.num_items} | sizes | context

    def input_keys(self, batch: JaggedBatch) -> InputKeys:
        """Return the keys each behaviour (or user) of the batch reads from each table."""
        found = InputKeys({ITEM: batch.items_T}, {})
        for name, each in self.item_features.items():
            _add(found, f"item.{name}", each.take(batch.items_T))
        for name, each in self.user_features.items():
            given_B = batch.user_features.get(name) if each.offsets_V1 is None else None
            if given_B is not None:
                _add(found, f"user.{name}", (given_B.to(torch.int64), None))
            else:  # user -1, whom the store does not know, is the last row
                _add(found, f"user.{name}", each.take(batch.sample_ids_B.remainder(each.rows)))
        for name in self.context:
            _add(found, f"{CONTEXT_TABLE}{name}", (batch.context[name], None))
        return found


def _find_edges(values_V: np.ndarray, recipe: Recipe) -> list[float]:
    scale = log_edges if recipe.number_scaling == "log" else quantile_edges
    return scale(values_V, recipe.number_bins)


def _add(found: InputKeys, table: str, taken: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    found.keys[table], offsets = taken
    if offsets is not None:
        found.offsets[table] = offsets


def _codes_by_row(
    codes: np.ndarray, offsets_V1: np.ndarray, cardinality: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row's different codes in ascending order; only 0, "unknown", where none is."""
    rows = np.repeat(np.arange(offsets_V1.size - 1), np.diff(offsets_V1))
    codes = codes[offsets_V1[0] : offsets_V1[-1]]
    rows, codes = rows[codes > 0], codes[codes > 0]
    empty = np.setdiff1d(np.arange(offsets_V1.size - 1), rows)
    rows, codes = np.divmod(
        np.unique(np.concatenate([rows * cardinality + codes, empty * cardinality])), cardinality
    )
    lengths_V = np.bincount(rows, minlength=offsets_V1.size - 1)
    return torch.from_numpy(codes), offsets_from_lengths(torch.from_numpy(lengths_V))


def labels_TA(recipe: Recipe, batch: JaggedBatch, dtype: torch.dtype) -> torch.Tensor:
    """Return the actions that happened: 1 where a task's column reached its threshold."""
    columns = [batch.actions[task.column] >= task.threshold for task in recipe.tasks.values()]
    return torch.stack(columns, dim=1).to(dtype)


def _require(noun: str, names: Iterable[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) if known else "; the store has none"
            raise SlipstreamError(f"the store has no {noun} '{name}'{hint}")
