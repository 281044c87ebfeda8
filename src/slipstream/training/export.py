"""From a run to a bundle, which serving opens. Touch this when serving needs more of a model."""

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from slipstream.bundle import FORMAT, Bundle, StreamedTensor, write_bundle
from slipstream.data.store import ITEMS, SequenceStore
from slipstream.ops.row_readers import NormalizedRows, RowReader
from slipstream.ops.topk import QUANTIZED_FROM
from slipstream.tables.collection import TableRows
from slipstream.training.features import ITEM
from slipstream.training.popularity import popular_items
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
    contents["tensors"] |= {
        f"tables/{name}": StreamedTensor(rows.shape, table.dtype, functools.partial(_tiles, rows))
        for name, table in recommender.tables.tables.items()
        for rows in (TableRows(recommender.tables, name),)
    }
    contents["tensors"] |= popular_items(store, recommender.recipe)
    inputs = [*inputs, store.directory]
    return write_bundle(
        Path(out),
        items=store.directory / ITEMS,
        search=_searched_rows(recommender),
        force=force,
        inputs=inputs,
        **contents,
    )


def _tiles(rows: RowReader) -> Iterator[torch.Tensor]:
    return (rows_CD for _, rows_CD in rows.tiles())


def _searched_rows(recommender: Recommender) -> RowReader | None:
    """Return what queries are compared with, where the catalogue is searched by codes."""
    rows = TableRows(recommender.tables, ITEM)
    if recommender.recipe.task != "retrieval" or rows.shape[0] < QUANTIZED_FROM:
        return None
    return NormalizedRows(rows) if recommender.recipe.loss.normalize else rows


def bundle_in_memory(recommender: Recommender, store: SequenceStore) -> Bundle:
    """Return the bundle that an export would write, without writing it."""
    contents = _contents(recommender, store)
    tensors = contents.pop("tensors")
    description = {"format": FORMAT, "version": "not exported", **contents}
    tables = {name: TableRows(recommender.tables, name) for name in recommender.tables.tables}
    return Bundle(store.directory, description, tensors, tables)


def _contents(recommender: Recommender, store: SequenceStore) -> dict[str, Any]:
    """Return all of a bundle that depends on the recommender, but for its tables."""
    features = recommender.features
    tensors = {
        f"model/{name}": value.cpu() for name, value in recommender.model.state_dict().items()
    }
    for name, each in features.item_features.items():
        tensors[f"codes/{name}"] = each.codes
        if each.offsets_V1 is not None:
            tensors[f"offsets/{name}"] = each.offsets_V1
    for name, vectors_ND in features.item_vectors.items():
        tensors[f"vectors/{name}"] = torch.from_numpy(vectors_ND)
    items, users = features.item_features, features.user_features
    return {
        "recipe": recommender.recipe.model_dump(mode="json", exclude={"data"}),
        "sizes": {
            "num_items": features.num_items,
            "item_cardinalities": {name: each.cardinality for name, each in items.items()},
            "user_cardinalities": {name: each.cardinality for name, each in users.items()},
            "user_kinds": {name: each.kind for name, each in users.items()},
            "timed": bool(store.meta.get("timed", True)),
            "widths": recommender.input_widths,
            "item_vectors": list(features.item_vectors),
            "context_cardinalities": features.context,
        },
        "tensors": tensors,
        "user_labels": {
            name: store.user_features[name].labels.to_pylist()
            for name, each in users.items()
            if each.kind != "number"
        },
        "context_labels": {
            name: store.context[name].labels.to_pylist() for name in features.context
        },
        "number_edges": features.number_edges(),
    }
