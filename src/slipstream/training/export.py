"""From a run to a bundle and back: what serving and `recommend` open instead of a checkpoint."""

import os
from pathlib import Path

import torch

from slipstream.bundle import Bundle, write_bundle
from slipstream.data.store import ITEMS, SequenceStore
from slipstream.training.features import Features
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender


def export_recommender(
    recommender: Recommender, store: SequenceStore, out: str | os.PathLike[str], **figures: object
) -> str:
    """Write a recommender as a bundle; returns the bundle's version."""
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
    recipe = recommender.recipe.model_dump(mode="json", exclude={"data"})
    return write_bundle(Path(out), recipe, sizes, tensors, store.directory / ITEMS, **figures)


def load_recommender(bundle: Bundle) -> Recommender:
    """The recommender of a bundle, ready to answer."""
    sizes = bundle.description["sizes"]
    features = Features(
        sizes["num_items"],
        bundle.part("codes"),
        sizes["item_cardinalities"],
        sizes["user_cardinalities"],
    )
    recommender = Recommender(Recipe.model_validate(bundle.description["recipe"]), features)
    recommender.model.load_state_dict(bundle.part("model"))
    with torch.no_grad():
        for name, rows_ND in bundle.part("tables").items():
            recommender.tables[name].all_rows().copy_(rows_ND)
    return recommender
