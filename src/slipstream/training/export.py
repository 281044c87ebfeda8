"""From a run to a bundle, which serving opens. Touch this when serving needs more of a model."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream.bundle import FORMAT, Bundle, write_bundle
from slipstream.data.store import ITEMS, SequenceStore
from slipstream.training.recommender import Recommender


def export_recommender(
    recommender: Recommender,
    store: SequenceStore,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    inputs: Iterable[str | os.PathLike[str]] = (),
    **figures: object,
) -> str:
    """Write a recommender as a bundle; return the bundle's version.

    `force` replaces an older bundle; `inputs` (the run) are never written over, nor is the store.
    """
    contents = _contents(recommender, store) | figures
    inputs = [*inputs, store.directory]
    return write_bundle(
        Path(out), items=store.directory / ITEMS, force=force, inputs=inputs, **contents
    )


def bundle_in_memory(recommender: Recommender, store: SequenceStore) -> Bundle:
    """Return the bundle that an export would write, without writing it."""
    contents = _contents(recommender, store)
    tensors = contents.pop("tensors")
    description = {"format": FORMAT, "version": "not exported", **contents}
    return Bundle(store.directory, description, tensors)


def _contents(recommender: Recommender, store: SequenceStore) -> dict[str, Any]:
    """Return all of a bundle that depends on the recommender, as `write_bundle` takes it."""
    features = recommender.features
    tensors = {
        f"model/{name}": value.cpu() for name, value in recommender.model.state_dict().items()
    }
    tensors |= {
        f"tables/{name}": table.all_rows() for name, table in recommender.tables.tables.items()
    }
    for name, each in features.item_features.items():
        tensors[f"codes/{name}"] = each.codes
        if each.offsets_V1 is not None:
            tensors[f"offsets/{name}"] = each.offsets_V1
    items, users = features.item_features, features.user_features
    return {
        "recipe": recommender.recipe.model_dump(mode="json", exclude={"data"}),
        "sizes": {
            "num_items": features.num_items,
            "item_cardinalities": {name: each.cardinality for name, each in items.items()},
            "user_cardinalities": {name: each.cardinality for name, each in users.items()},
            "user_kinds": {name: each.kind for name, each in users.items()},
            "timed": bool(store.meta.get("timed", True)),
        },
        "tensors": tensors,
        "user_labels": {
            name: store.user_features[name].labels.to_pylist()
            for name, each in users.items()
            if each.kind != "number"
        },
        "number_edges": {
            table: list(each.edges)
            for table, each in features.by_table().items()
            if each.kind == "number"
        },
    }
