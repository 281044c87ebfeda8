"""A small store and small recipes for the tests of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from slipstream.bundle import Bundle
from slipstream.data.batch import JaggedBatch
from slipstream.data.context_columns import context_feature
from slipstream.data.store import SequenceStore, write_store
from slipstream.training import checkpoint, row_files
from slipstream.training.features import FeatureCodes, Features
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.step import StepInputs
from slipstream.training.telemetry import read_metrics


def codes(values: np.ndarray, cardinality: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        pa.array(values, pa.int64()), pa.array([f"label {i}" for i in range(cardinality)])
    )


def code_lists(rows: int, cardinality: int, seed: int) -> pa.Array:
    """Zero to four codes a row; the first row has none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, rows)
    lengths[0] = 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    values = codes(rng.integers(1, cardinality, int(lengths.sum())), cardinality)
    return pa.LargeListArray.from_arrays(offsets, values)


def numbers(rows: int, seed: int) -> pa.Array:
    """A number a row; the second row's is not known."""
    values = np.random.default_rng(seed).lognormal(3, 1, rows).astype(np.float32)
    values[1] = np.nan
    return pa.array(values)


def small_store(
    directory: Path,
    *,
    users: int = 12,
    items: int = 15,
    seed: int = 0,
    mean_length: int = 8,
    rich: bool = False,
    timed: bool = True,
) -> SequenceStore:
    """Users of 1 to 2 x mean_length behaviours; the next item often follows from the last.

    A rich store has features of all kinds: colours and price of items, hobbies and income of users,
    the surface and the device of every behaviour.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 2 * mean_length, users)
    lengths[:2] = (1, 2 * mean_length)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    log = rng.integers(0, items, total)
    for place in range(1, total):
        if rng.random() < 0.7:
            log[place] = (log[place - 1] * 3 + 1) % items
    times = np.sort(rng.integers(0, 10**6, total)).astype(np.int64) * timed
    actions = {name: (rng.random(total) < 0.4).astype(np.float32) for name in ("click", "like")}
    item_table = pa.table(
        {"id": pa.array(np.arange(items) + 2**62), "feature:genre": codes(np.arange(items) % 4, 4)}
    )
    user_table = pa.table(
        {"id": pa.array(np.arange(users)), "feature:age": codes(np.arange(users) % 3, 3)}
    )
    if rich:
        item_table = item_table.append_column("feature:colours", code_lists(items, 6, seed=1))
        item_table = item_table.append_column("feature:price", numbers(items, seed=2))
        user_table = user_table.append_column("feature:hobbies", code_lists(users, 5, seed=3))
        user_table = user_table.append_column("feature:income", numbers(users, seed=4))
    directory.mkdir(parents=True, exist_ok=True)
    meta = {} if timed else {"timed": False}
    context = {}
    if rich:
        drawn = np.random.default_rng(seed + 5)
        for name, labels in (("surface", ["cart", "home", "search"]), ("device", ["app", "web"])):
            codes_N = drawn.integers(0, len(labels) + 1, total).astype(np.int32)
            context[name] = context_feature(codes_N, labels)
    write_store(
        directory,
        offsets,
        log.astype(np.int64),
        times,
        actions,
        item_table,
        user_table,
        meta,
        context,
    )
    return SequenceStore.open(directory)


RICH = {
    "item_features": ["colours", "genre", "price"],
    "user_features": ["hobbies", "age", "income"],
    "context_features": ["surface", "device"],
    "number_bins": 4,
}


def small_recipe(**changes: Any) -> Recipe:
    """A tiny HSTU retrieval recipe; `changes` are sections or values laid over it."""
    content: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "model": {
            "kind": "hstu",
            "dim": 8,
            "blocks": 1,
            "heads": 2,
            "max_len": 8,
            "time_buckets": 6,
            "dropout": 0.2,
        },
        "sampler": {"max_len": 8, "batch_size": 4},
        "loss": {"negatives": 5},
        "train": {
            "epochs": 2,
            "evaluate_every": 0,
            "log_every": 2,
            "threads": 1,
            "tensorboard": False,
        },
    }
    for key, value in changes.items():
        content[key] = (
            {**content[key], **value}
            if isinstance(value, dict) and isinstance(content.get(key), dict)
            else value
        )
    return Recipe.model_validate(content)


def recommender_of(bundle: Bundle) -> Recommender:
    """The recommender a bundle was exported from, made from nothing but the bundle."""
    sizes = bundle.description["sizes"]
    offsets = bundle.part("offsets")
    items = {
        name: FeatureCodes(codes, sizes["item_cardinalities"][name], offsets_V1=offsets.get(name))
        for name, codes in bundle.part("codes").items()
    }
    nobody = torch.zeros(1, dtype=torch.int64)
    users = {
        name: FeatureCodes(nobody, cardinality)
        for name, cardinality in sizes["user_cardinalities"].items()
    }
    context = sizes["context_cardinalities"]
    features = Features(sizes["num_items"], items, users, context=context)
    recommender = Recommender(Recipe.model_validate(bundle.description["recipe"]), features)
    recommender.model.load_state_dict(bundle.part("model"))
    with torch.no_grad():
        for name, rows_ND in bundle.part("tables").items():
            recommender.tables[name].all_rows().copy_(rows_ND)
    return recommender


def read_step(recommender: Recommender, batch: JaggedBatch, step: int) -> StepInputs:
    """Plan a step over a batch and read its rows."""
    return recommender.read(recommender.plan_step(batch, step))


def loss_of(recommender: Recommender, batch: JaggedBatch, step: int) -> torch.Tensor:
    """The loss of a step over a batch, summed."""
    return recommender.loss(read_step(recommender, batch, step))


def users_of(batch: JaggedBatch, users: list[int]) -> JaggedBatch:
    """Some users of a batch as a batch of their own."""
    spans = [slice(int(batch.offsets_B1[b]), int(batch.offsets_B1[b + 1])) for b in users]
    lengths = batch.lengths_B[users]

    def tokens(value_T: torch.Tensor) -> torch.Tensor:
        return torch.cat([value_T[span] for span in spans])

    return JaggedBatch(
        sample_ids_B=batch.sample_ids_B[users],
        first_positions_B=batch.first_positions_B[users],
        offsets_B1=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        items_T=tokens(batch.items_T),
        timestamps_T=tokens(batch.timestamps_T),
        next_items_T=tokens(batch.next_items_T),
        next_timestamps_T=tokens(batch.next_timestamps_T),
        supervised_T=tokens(batch.supervised_T),
        actions={name: tokens(value) for name, value in batch.actions.items()},
        context={name: tokens(value) for name, value in batch.context.items()},
        user_features={name: value[users] for name, value in batch.user_features.items()},
        global_targets_P=batch.global_targets_P,
    )


def saved_tensors(run_dir: Path, kind: str = checkpoint.LAST) -> dict[str, torch.Tensor]:
    """The tensors of a run's newest checkpoint of a kind."""
    newest = checkpoint.latest(run_dir / "checkpoints", kind)
    assert newest is not None
    return tensors_of(newest)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint; rows in row files as `tables/…`, ascending by key."""
    found = load_file(path / checkpoint.TENSORS)
    names = checkpoint.read_state(path).get("row_tables", [])
    files = checkpoint.row_files(path, names)
    for name in names:
        own = [file for file in files if file.table == name]
        pieces = list(row_files.live_rows(own, None, lambda keys: torch.ones_like(keys).bool()))
        parts = [piece.tensors() for piece in pieces]
        order = torch.cat([part["keys"] for part in parts]).argsort()
        for entry in parts[0]:
            found[f"tables/{name}/{entry}"] = torch.cat([part[entry] for part in parts])[order]
    return found


def same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether two checkpoints are bit for bit the same."""
    return one.keys() == two.keys() and all(
        torch.equal(value, two[name]) for name, value in one.items()
    )


def logged_losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every line of a run's metrics that has a loss."""
    return [
        (record["step"], record["loss"])
        for record in read_metrics(run_dir / "metrics.jsonl")
        if "loss" in record
    ]


def growing(figures: list[float]) -> Callable[..., dict[str, float]]:
    """An evaluation that gives these figures one after the other, then falls."""
    values = iter(figures)
    return lambda recommender, store, recipe, which: {"HR@10": next(values, 0.0), "NDCG@10": 0.0}
