"""From a run to a bundle, which serving opens. Touch this when serving needs more of a model."""

import os
from pathlib import Path
from typing import Any

import torch

from slipstream.bundle import Bundle, write_bundle
from slipstream.data.store import ITEMS, SequenceStore
from slipstream.training.recommender import Recommender


def export_recommender(
    recommender: Recommender, store: SequenceStore, out: str | os.PathLike[str], **figures: object
) -> str:
    """Write a recommender as a bundle; return the bundle's version."""
    recipe, sizes, tensors = bundle_parts(recommender)
    return write_bundle(Path(out), recipe, sizes, tensors, store.directory / ITEMS, **figures)


def bundle_in_memory(recommender: Recommender, store: SequenceStore) -> Bundle:
    """Return the bundle that an export would write, without writing it."""
    recipe, sizes, tensors = bundle_parts(recommender)
    description = {"version": "not exported", "recipe": recipe, "sizes": sizes}
    return Bundle(store.directory, description, tensors)


def bundle_parts(
    recommender: Recommender,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Return recipe, sizes and tensors of a bundle."""
    features = recommender.features
    tensors = {f"model/{name}": value for name, value in recommender.model.state_dict().items()}
    tensors |= {
        f"tables/{name}": table.all_rows() for name, table in recommender.tables.tables.items()
    }
    tensors |= {f"codes/{name}": codes for name, codes in features.item_codes.items()}
    sizes = {
        "num_items": features.num_items,
        "item_cardinalities": features.item_cardinalities,
        "user_cardinalities": features.user_cardinalities,
    }
    return recommender.recipe.model_dump(mode="json", exclude={"data"}), sizes, tensors
