"""Key inflation of clustered against random cuts: MovieLens-1M histories and Zipf batches.

A sample is a user's window, as in training: it cannot be cut, and holds each of its items about
once. Keys are the items of the windows. The time of a cut is compared with the step of the same
batch (HSTU, forward and backward, one thread), both by processor time. `long_search` is what a
hundred times the work finds: how far a cut can be from the best one. Touch this when clustering
changes.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.pipeline.setting import Setting, make_batch
from slipstream.bench.harness import Row, median
from slipstream.bench.step_samples import JaggedStep
from slipstream.data.batch import JaggedBatch
from slipstream.data.download import cache_directory
from slipstream.data.preparation import prepare
from slipstream.data.sampler import SamplerConfig, TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.pipeline.clustering import VISITS, cluster_samples, key_inflation, window_shares
from slipstream.training.recipe import Recipe

PARTS = 8


def movielens_batches(count: int, users: int, length: int) -> Iterator[tuple[JaggedBatch, int]]:
    """Make batches of users' windows from the downloaded archive; none where it is missing."""
    if not (cache_directory() / "ml-1m.zip").is_file():
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-clusters-") as scratch:
        prepare("ml-1m", Path(scratch) / "store")
        store = SequenceStore.open(Path(scratch) / "store")
        sampler = TrainingSampler(
            store, SamplerConfig.model_validate({"max_len": length, "batch_size": users}), seed=1
        )
        for _ in range(count):
            yield sampler.next_batch(), store.num_items


def zipf_batches(count: int, **shape: int) -> Iterator[tuple[JaggedBatch, int]]:
    """Make the batches of the pipeline benchmark, or of another shape."""
    setting = replace(Setting(), **shape)  # type: ignore[arg-type]
    for number in range(count):
        yield make_batch(setting, number, 0), setting.items


def measure(title: str, batches: list[tuple[JaggedBatch, int]], quick: bool) -> Row:
    """Compute mean inflation of both cuts, the fullest part, and the cost of clustering."""
    rng = torch.Generator().manual_seed(0)
    clustered, random, fullest, seconds = [], [], [], []
    for batch, _ in batches:
        begin = time.process_time()
        parts = cluster_samples(batch.items_T, batch.offsets_B1, PARTS)
        seconds.append(time.process_time() - begin)
        clustered.append(key_inflation(batch.items_T, batch.offsets_B1, parts))
        for _ in range(3):
            cut = list(torch.randperm(batch.num_users, generator=rng).tensor_split(PARTS))
            random.append(key_inflation(batch.items_T, batch.offsets_B1, cut))
        tokens = np.array([int(batch.lengths_B[part].sum()) for part in parts])
        fullest.append((tokens / tokens.sum() / window_shares(PARTS)).max())
    batch, items = batches[0]
    model: dict[str, Any] = {
        "kind": "hstu",
        "dim": 64,
        "heads": 2,
        "blocks": 2,
        "max_len": int(batch.lengths_B.max()),
    }
    recipe = Recipe.model_validate(
        {"name": "cut", "model": model, "loss": {"kind": "shared_softmax", "negatives": 128}}
    )
    step, steps = JaggedStep.of(recipe, items), []
    for _ in range(3):
        begin = time.process_time()
        step(batch)
        steps.append(time.process_time() - begin)
    row: Row = {
        "variant": title,
        "key_inflation": float(np.mean(clustered)),
        "key_inflation_random": float(np.mean(random)),
    }
    row["ratio"] = row["key_inflation"] / row["key_inflation_random"]
    searched = cluster_samples(
        batch.items_T, batch.offsets_B1, PARTS, visits=(2 if quick else 100) * VISITS
    )
    row["long_search"] = (
        row["ratio"] * key_inflation(batch.items_T, batch.offsets_B1, searched) / clustered[0]
    )
    row["fullest_part"], row["cluster_ms"] = float(np.mean(fullest)), 1e3 * median(seconds)
    row["share_of_step"] = median(seconds) / median(steps)
    row["samples"] = clustered
    return row


def cluster_rows(quick: bool) -> list[Row]:
    """Make one row per kind of data that is available."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = 1 if quick else 8
        kinds = {
            "MovieLens-1M, 128 windows of 200": movielens_batches(count, 128, 200),
            "MovieLens-1M, 1,024 windows of 50": movielens_batches(min(count, 2), 1024, 50),
            "Zipf in 24 topics, as many items and windows": zipf_batches(
                count, users=128, length=200, items=3706
            ),
            "the batches above": zipf_batches(count),
        }
        if quick:
            del kinds["MovieLens-1M, 1,024 windows of 50"], kinds["the batches above"]
        return [
            measure(title, list_of, quick)
            for title, batches in kinds.items()
            if (list_of := list(batches))
        ]
    finally:
        torch.set_num_threads(before)
