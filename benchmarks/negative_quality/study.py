"""What each way of choosing negatives is worth: HR@10 and NDCG@10, and the cost of a step.

Model, batches and seeds are the same. Every run trains a fixed number of epochs and is evaluated
once, at the end, on the test behaviours: nothing is chosen, so no choice adds noise. Each run
writes one JSON file named by everything that decides its numbers; the same command resumes. Touch
this when another way of choosing negatives should be compared.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.files import atomic_file, read_json, write_json
from slipstream.training.evaluation import evaluate
from slipstream.training.features import ITEM
from slipstream.training.loop import total_steps, train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.recipe import Recipe, trained_digest
from slipstream.training.recommender import Recommender

StepReport = Callable[[int, int], None]  # steps done, of how many
Progress = Callable[[str, int, int], None]  # the same with the name of the run
BASELINE = "128 own"
OPTIONS: dict[str, dict[str, Any]] = {
    BASELINE: {"negatives": 128},
    "32 own": {"negatives": 32},
    "64 own, k = 2": {"negatives": 64, "share": 2},
    "32 own, k = 4": {"negatives": 32, "share": 4},
    "32 own, k = 4 over the batch": {"negatives": 32, "share": 4, "share_within": "batch"},
    "32 own, k = 4, logits (ablation)": {"negatives": 32, "share": 4, "share_by": "logits"},
    "128 own, fp16": {"negatives": 128, "precision": "fp16"},
    "128 per sequence": {"kind": "sequence_softmax", "negatives": 128},
    "512 per step": {"kind": "shared_softmax", "negatives": 512},
    "128 own, popularity": {"negatives": 128, "sampling": "popularity"},
    "128 own, in-batch": {"negatives": 128, "sampling": "in_batch"},
    "128 own, mixed": {"negatives": 128, "sampling": "mixed"},
}
_SETTINGS: dict[str, Any] = {
    "task": "retrieval",
    "model": {
        "kind": "hstu",
        "dim": 50,
        "blocks": 2,
        "heads": 1,
        "max_len": 100,
        "dropout": 0.2,
        "input_dropout": 0.2,
    },
    "sampler": {"max_len": 100, "batch_size": 64},
    "optimizer": {"lr": 2e-3, "decay": "cosine", "warmup_steps": 50},
    "tables": {"optimizer": "rowwise_adam", "lr": 4e-3},
    "train": {"epochs": 5, "evaluate_every": 0, "threads": 1, "tensorboard": False},
}


def recipe_of(option: str, seed: int, epochs: int | None = None) -> Recipe:
    """Make the one recipe of the study, with the negatives of an option."""
    train = _SETTINGS["train"] | ({} if epochs is None else {"epochs": epochs})
    return Recipe.model_validate(
        {**_SETTINGS, "name": option, "seed": seed, "loss": OPTIONS[option], "train": train}
    )


def one_run(recipe: Recipe, store: SequenceStore, report: StepReport) -> dict[str, float]:
    """Train to the end and evaluate once; costs are medians over the steps."""
    recommender = Recommender.build(recipe, store)
    optimizer = make_adamw(recommender.model, recipe.optimizer)
    sampler = TrainingSampler(store, recipe.sampler, seed=recipe.seed, split=recipe.split)
    steps, seconds, negatives = total_steps(recipe, sampler.steps_per_epoch), [], []
    for step in range(steps):
        batch = sampler.next_batch()
        begin = time.process_time()
        train_step(recommender, optimizer, batch, step, steps)
        seconds.append(time.process_time() - begin)
        report(step + 1, steps)
        if step < 20:
            negatives.append(float(only_negatives(recommender, batch, step)))
    figures = evaluate(recommender, store, recipe, "test")
    cost = {
        "step_cpu_seconds": statistics.median(seconds),
        "negative_rows": statistics.median(negatives),
    }
    return {"HR@10": figures["HR@10"], "NDCG@10": figures["NDCG@10"], **cost, "steps": float(steps)}


def only_negatives(recommender: Recommender, batch: Any, step: int) -> int:
    """Rows a step must fetch that neither the history nor the targets need: what negatives cost in
    lookups and on the wire.
    """
    keys = recommender.plan_step(batch, step).keys[ITEM]
    assert keys.targets is not None and keys.negatives is not None
    needed = torch.cat([keys.inputs, keys.targets]).unique()
    drawn = keys.negatives.unique()
    return int((~torch.isin(drawn, needed)).sum())


def run_study(
    store: SequenceStore,
    out: Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    options: Sequence[str] = (),
    epochs: int | None = None,
    progress: Progress | None = None,
) -> str:
    """Do the missing runs, seed by seed, on one thread; returns and writes the table."""
    for option in options:
        if option not in OPTIONS:
            raise SlipstreamError(
                f"unknown option '{option}' of the study{did_you_mean(option, OPTIONS)}"
            )
    out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in OPTIONS if not options or name in options]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in seeds:
            for option in chosen:
                found[option].append(
                    _kept_run(recipe_of(option, seed, epochs), store, out, progress)
                )
    finally:
        torch.set_num_threads(threads)
    table = as_table(found)
    with atomic_file(out / "negatives.md") as path:
        path.write_text(table, encoding="utf-8")
    return table


def _kept_run(
    recipe: Recipe, store: SequenceStore, out: Path, progress: Progress | None
) -> dict[str, float]:
    """Return the result of a run, which is trained unless its file is there."""
    content = f"{trained_digest(recipe)} {recipe.train.epochs} {store.digest}"
    path = out / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
    if not path.exists():

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(f"{recipe.name}, seed {recipe.seed}", done, total)

        write_json(
            path, {"option": recipe.name, "seed": recipe.seed, **one_run(recipe, store, report)}
        )
    return read_json(path)


def as_table(found: dict[str, list[dict[str, float]]]) -> str:
    """Make the Markdown table.

    It has means with their spread, the paired difference to the baseline, and relative costs.
    """
    base = found.get(BASELINE)
    lines = [
        "| negatives | HR@10 | NDCG@10 | HR@10 to baseline | step CPU | rows fetched for "
        "negatives alone |",
        "|---|---|---|---|---|---|",
    ]
    for option, runs in found.items():
        hits, gains = ([run[name] for run in runs] for name in ("HR@10", "NDCG@10"))
        paired = (
            []
            if base is None
            else [run["HR@10"] - other["HR@10"] for run, other in zip(runs, base, strict=True)]
        )
        cost, rows = (
            statistics.median([run[name] for run in runs])
            for name in ("step_cpu_seconds", "negative_rows")
        )
        against = statistics.median([run["step_cpu_seconds"] for run in base]) if base else cost
        difference = (
            ""
            if option == BASELINE or not paired
            else f"{statistics.mean(paired):+.4f} ± {_spread(paired):.4f}"
        )
        lines.append(
            f"| {option} | {statistics.mean(hits):.4f} ± {_spread(hits):.4f} | "
            f"{statistics.mean(gains):.4f} ± {_spread(gains):.4f} "
            f"| {difference} | {cost / against:.2f}x | {rows:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
