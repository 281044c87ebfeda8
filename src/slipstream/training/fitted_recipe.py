"""Settings that a recipe leaves to the data (`fit_to_data`), chosen by rules from a few statistics.

A key that a recipe or an override gives is never changed. The run's recipe.yaml holds the numbers,
and a run that goes on keeps its own, also where its data have grown since. Touch this when a rule
changes; what speaks for each is in docs/explanation/fitted-recipes.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import check, flatten, merge_settings
from slipstream.data.splits import Split
from slipstream.data.store import SequenceStore
from slipstream.files import kind_of_directory, read_json
from slipstream.training.recipe import Recipe
from slipstream.training.run_directory import NOTE, is_same_or_grown, read_recipe

LENGTHS = (50, 100, 200)  # of which the shortest that holds most histories is taken
SPARSE = 100.0  # behaviours an item, below which rows are learnt from little
SCARCE = 30.0  # behaviours an item, below which its features say what its row cannot
LARGE_CATALOGUE = 50_000  # items, above which a softmax over all of them costs too much


@dataclass(frozen=True)
class DataStatistics:
    """What the rules know of a store's training part."""

    items: int
    behaviours: int
    long_history: int  # the 95th percentile of the lengths
    item_features: tuple[str, ...] = ()

    @property
    def behaviours_per_item(self) -> float:
        """How often an item is seen on average."""
        return self.behaviours / max(1, self.items)


def statistics_of(store: SequenceStore, split: Split) -> DataStatistics:
    """Return the statistics of what trains."""
    lengths_U = split.train_lengths(store)
    trained_U = lengths_U[lengths_U > 0]
    long_history = int(np.percentile(trained_U, 95)) if len(trained_U) else 1
    features = tuple(store.item_features)
    return DataStatistics(store.num_items, int(lengths_U.sum()), long_history, features)


def fitted_settings(data: DataStatistics) -> dict[str, Any]:
    """Return every key that is fitted, with the value that the rules choose."""
    length = next((each for each in LENGTHS if data.long_history <= each), LENGTHS[-1])
    dropout = 0.5 if data.behaviours_per_item < SPARSE else 0.2
    large, scarce = data.items > LARGE_CATALOGUE, data.behaviours_per_item < SCARCE
    return {
        "item_features": list(data.item_features) if scarce else [],
        "model.max_len": length,
        "sampler.max_len": length,
        "model.dropout": dropout,
        "model.input_dropout": dropout,
        "loss.kind": "sampled_softmax" if large else "full_softmax",
        "loss.negatives": 512 if large else 128,
    }


def fit_recipe(
    recipe: Recipe, store: SequenceStore, run_dir: Path
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe with the keys that it leaves to the data, and these keys.

    A run in `run_dir` whose data have grown into this store keeps the values it has.
    """
    if not recipe.fit_to_data:
        return recipe, {}
    values = recipe.model_dump(mode="json", exclude_unset=True)
    given = flatten(values)
    fitted = fitted_settings(statistics_of(store, recipe.split))
    if _has_grown(store, run_dir, recipe):
        earlier = flatten(read_recipe(run_dir).model_dump(mode="json"))
        fitted = {key: earlier[key] for key in fitted}
    chosen = {key: value for key, value in fitted.items() if key not in given}
    values["fit_to_data"] = False
    where = f"{recipe.name}, fitted to the data"
    return check(Recipe, merge_settings(Recipe, values, chosen, where), where), chosen


def _has_grown(store: SequenceStore, run_dir: Path, recipe: Recipe) -> bool:
    """Whether a directory holds a run on an earlier state of this store."""
    if kind_of_directory(run_dir) != "run":
        return False
    run = read_json(run_dir / NOTE)
    same = run.get("store", {}).get("digest") == store.meta.get("digest")
    return not same and is_same_or_grown(store, run, recipe)
