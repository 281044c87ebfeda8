"""The shipped ranking recipe beside DIN on the same impressions of KuaiRand-Pure: AUC and GAUC.

The protocol is benchmarks/protocols/ranking.md. Touch this when a contender is added.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.arena.data_sets import data_root
from benchmarks.arena.peers.contest_io import peak_bytes
from benchmarks.ranking.din import EPOCHS, train_din
from slipstream import api
from slipstream.bench.harness import Row, finish, note
from slipstream.config import load_recipe
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.ops.allocator import keep_freed_memory
from slipstream.training.recipe import Recipe

RECIPE, OURS, DIN = "kuairand-pure-ranking", "slipstream", "din"
THREADS, SEEDS = 2, (1, 2, 3)
QUICK_LOG = Synthetic(users=800, items=80, topics=8, length_mu=2.5, length_max=30, seed=3)
QUICK = (  # the synthetic log has two actions and one item feature
    "tasks={click: {column: click}, like: {column: like}}",
    "item_features=[topic]",
    "user_features=[]",
    "model.dim=16",
    "train.epochs=1",
)


def train_ours(store: SequenceStore, overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """Train the shipped recipe and return its test figures."""
    with tempfile.TemporaryDirectory() as folder:
        out, begun = Path(folder) / "run", time.perf_counter()
        words = [*overrides, f"seed={seed}", f"threads={THREADS}", "train.tensorboard=false"]
        run = api.train(RECIPE, *words, data=store, out=out, quiet=True)
        seconds = time.perf_counter() - begun
        told = read_json(out / "run.json")
        steps_an_epoch = told["step"] / max(1, told["epoch"])
        figures = run.evaluate("test")
        return {
            "test": {name: float(value) for name, value in figures.items()},
            "epochs": told["epoch"],
            "best_epoch": round(told["best_step"] / steps_an_epoch),
            "seconds": seconds,
        }


def run_cell(
    variant: str, directory: Path, overrides: Sequence[str], seed: int, epochs: int
) -> dict[str, Any]:
    """Train and test one contender in this process."""
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    store = SequenceStore.open(directory)
    if variant == OURS:
        found = train_ours(store, overrides, seed)
    else:
        found = train_din(store, load_recipe(Recipe, RECIPE, overrides), seed, epochs)
    return {**found, "seed": seed, "peak_bytes": peak_bytes()}


def make_store(quick: bool, folder: Path) -> SequenceStore:
    """Prepare the log."""
    if quick:
        return api.prepare("synthetic", folder, synthetic=QUICK_LOG, quiet=True)
    source = data_root() / "kuairand-pure"
    if not source.is_dir():
        raise SlipstreamError(
            f"there is no {source}; set SLIPSTREAM_DATA to the folder that has 'kuairand-pure'"
        )
    return api.prepare("kuairand-pure", folder, source=source, quiet=True)


def summary(variant: str, samples: list[dict[str, Any]]) -> Row:
    """Return the row of a contender: means over its seeds."""
    row: Row = {"variant": variant}
    for name in sorted(samples[0]["test"]):
        if name.split("/")[0] in ("AUC", "GAUC"):
            values = [sample["test"][name] for sample in samples]
            row[name] = statistics.fmean(values)
            row[f"sd {name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    for name in ("seconds", "peak_bytes", "epochs", "best_epoch"):
        row[name] = statistics.median(sample[name] for sample in samples)
    return {**row, "samples": samples}


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Run both contenders in turns; every run is a process of its own."""
    overrides, epochs = (QUICK, 1) if quick else ((), EPOCHS)
    samples: dict[str, list[dict[str, Any]]] = {OURS: [], DIN: []}
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(quick, Path(folder) / "store")
        for seed in SEEDS[:1] if quick else SEEDS:
            for variant, found in samples.items():
                note(f"{variant}, seed {seed}")
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    cell = pool.submit(
                        run_cell, variant, store.directory, overrides, seed, epochs
                    ).result()
                found.append(cell)
                note(f"{variant}, seed {seed}: AUC {cell['test']['AUC']:.4f}")
    asked = {each["test"]["behaviours"] for found in samples.values() for each in found}
    if len(asked) > 1:
        raise SlipstreamError(f"the contenders were asked for different impressions: {asked}")
    rows = [summary(variant, found) for variant, found in samples.items()]
    return finish("ranking", rows, claims_of(*rows), json_path)


def claims_of(ours: Row, din: Row) -> dict[str, float]:
    """Return the headline figures."""
    claims: dict[str, float] = {}
    for ending, row in (("", ours), ("_din", din)):
        claims |= {f"auc{ending}": row["AUC"], f"gauc{ending}": row["GAUC"]}
        claims[f"sd_auc{ending}"] = row["sd AUC"]
    claims["time_vs_din"] = ours["seconds"] / din["seconds"]
    claims["memory_vs_din"] = ours["peak_bytes"] / din["peak_bytes"]
    return claims
