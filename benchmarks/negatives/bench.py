"""What negatives cost in a training step: fetched in segments, in 16 bits, shared between tokens.

Three ways to fetch the rows. `gathered` is the common one: a [tokens, negatives, width] tensor.
`fused` is ours without segments: all *distinct* rows once, read in place; over a large catalogue
that is nearly as many. `segmented` holds two segments. The catalogue has a million items, so
negatives hardly repeat. `negative_peak_bytes` is what a step's peak memory grows by over the same
step with one negative a token. Sharing is compared with the same own negatives without it (k times
the logits) and with as many logits drawn freshly; its hardest case is the small ML-1M model, where
the loss is a third of the step. All variants have training's allocator. `--quick` takes fewer
repeats and sizes. Touch this when another way of fetching or sharing should be compared.
"""

import functools
import gc
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.negatives import ranks as negative_ranks
from benchmarks.negatives import steps as negative_steps
from slipstream.bench.harness import (
    Row,
    finish,
    interleave,
    median,
    note,
    set_training_allocator,
    spread,
)
from slipstream.bench.step_samples import JaggedStep, batch_of
from slipstream.bench.train_step import MOVIELENS_ITEMS, movielens_lengths
from slipstream.config import load_recipe
from slipstream.training.features import ITEM
from slipstream.training.recipe import Recipe

THREADS = 2
ITEMS, QUICK_ITEMS = 1_000_000, 100_000
LENGTHS, QUICK_LENGTHS = [256] * 8, [64] * 8
COUNTS, QUICK_COUNTS = (32, 64, 128, 512), (32, 64)
WAYS = ("gathered", "fused", "segmented")


def fetch_rows(counts: tuple[int, ...], lengths: list[int], items: int, repeats: int) -> list[Row]:
    """Measure time (in turns) and memory (a process each) of every way and count."""
    threads, batch, rows = torch.get_num_threads(), batch_of(lengths, items), []
    note("the memory of every way, each in a process of its own")
    sized = {
        way: negative_steps.memory_of(way, [1, *counts], lengths, items, threads)
        for way in negative_steps.VARIANTS
    }
    without = sized["fused"][1]["step_bytes"]
    for negatives in counts:
        note(f"steps with {negatives} negatives a token")
        ways = (*WAYS, "segmented fp16") if negatives == max(counts) else WAYS
        steps = {way: negative_steps.variant_step(way, items, negatives=negatives) for way in ways}
        seconds = interleave(
            {way: functools.partial(step, batch) for way, step in steps.items()}, repeats=repeats
        )
        del steps
        gc.collect()
        memory = {way: sized[way][negatives] for way in ways}
        note(
            ", ".join(
                f"{way} {1e3 * median(seconds[way]):.0f} ms "
                f"{(memory[way]['step_bytes'] - without) / 1e6:.0f} MB"
                for way in ways
            )
        )
        for way in ways:
            rows.append(
                {
                    "variant": f"{way}, R={negatives}",
                    "negative_peak_bytes": memory[way]["step_bytes"] - without,
                    "peak_bytes": memory[way]["peak_bytes"],
                    "saved": 1
                    - (memory[way]["step_bytes"] - without)
                    / (memory["gathered"]["step_bytes"] - without),
                    "step_ms": 1e3 * median(seconds[way]),
                    "spread": spread(seconds[way]),
                    "x_gathered": median(seconds[way]) / median(seconds["gathered"]),
                    "x_fused": median(seconds[way]) / median(seconds["fused"]),
                    "samples": seconds[way],
                }
            )
    return rows


def sharing_rows(
    name: str, recipe: Recipe, lengths: list[int], items: int, repeats: int, *, brief: bool = False
) -> list[Row]:
    """Measure steps of one model with k = 1, 2, 4 and the same own negatives.

    Unless `brief`, also with as many logits drawn freshly.
    """
    note(f"sharing negatives: {name}")
    own = recipe.loss.negatives
    options: dict[str, dict[str, Any]] = {
        f"{own} own": {},
        f"{own} own, k=2": {"share": 2},
        f"{own} own, k=4": {"share": 4},
        f"{own // 2} own, k=2": {"negatives": own // 2, "share": 2},
        f"{own // 4} own, k=4": {"negatives": own // 4, "share": 4},
        f"{4 * own} own": {"negatives": 4 * own},
        f"{own} per sequence": {"kind": "sequence_softmax"},
        f"{own} per step": {"kind": "shared_softmax"},
    }
    options = dict(list(options.items())[:3]) if brief else options
    batch, content = batch_of(lengths, items), recipe.model_dump()
    steps = {
        label: JaggedStep.of(
            Recipe.model_validate({**content, "loss": {**content["loss"], **changes}}), items
        )
        for label, changes in options.items()
    }
    lookups = {label: looked_up(step, batch) for label, step in steps.items()}
    seconds = interleave(
        {label: functools.partial(step, batch) for label, step in steps.items()}, repeats=repeats
    )
    plain = f"{own} own"
    note(", ".join(f"{label} {1e3 * median(taken):.0f} ms" for label, taken in seconds.items()))
    return [
        {
            "variant": f"{name}: {label}",
            "step_ms": 1e3 * median(seconds[label]),
            "spread": spread(seconds[label]),
            "x_plain": median(seconds[label]) / median(seconds[plain]),
            "lookups": lookups[label],
            "extra_lookups": lookups[label] - lookups[plain],
            "samples": seconds[label],
        }
        for label in options
    ]


def looked_up(step: JaggedStep, batch: Any) -> int:
    """Item keys a step asks its tables for, repeats counted."""
    return sum(keys.numel() for keys in step.recommender.plan_step(batch, 0).key_lists()[ITEM])


def byte_rows(lengths: list[int], items: int, negatives: int) -> tuple[list[Row], dict[str, float]]:
    """Count bytes between two ranks in one step, in 32 and in 16 bits."""
    note("counting bytes between two ranks")
    found = negative_ranks.measure(lengths, items, negatives)
    full, half = found["fp32"], found["fp16"]
    rows: list[Row] = [
        {
            "variant": f"two ranks, {precision}",
            **{f"{name}_bytes": value for name, value in each.items()},
        }
        for precision, each in found.items()
    ]
    figures = {
        "fp16_bytes_ratio": half["16 bits"] / (full["exact"] - half["exact"]),
        "fp16_bytes_ratio_with_keys_and_positives": sum(half.values()) / sum(full.values()),
    }
    return rows, figures


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print tables, write the JSON if a path is given."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    try:
        set_training_allocator()
        lengths, items = (QUICK_LENGTHS, QUICK_ITEMS) if quick else (LENGTHS, ITEMS)
        fetch = fetch_rows(QUICK_COUNTS if quick else COUNTS, lengths, items, 2 if quick else 5)
        movielens, _ = movielens_lengths()
        small = Recipe.model_validate(
            {
                "name": "small",
                "model": {"kind": "hstu", "size": "small"},
                "loss": {"negatives": 128},
            }
        )
        repeats = 2 if quick else 5
        sharing = sharing_rows(
            "ml-1m",
            load_recipe(Recipe, "ml-1m-hstu"),
            movielens[:16] if quick else movielens,
            MOVIELENS_ITEMS,
            repeats,
        )
        if not quick:
            sharing += sharing_rows(
                "hstu-small", small, [small.model.max_len], 20_000, repeats, brief=True
            )
        exchanged, figures = byte_rows(lengths[:4], items, 64)
        return finish(
            "negatives", [*fetch, *sharing, *exchanged], claims(fetch, sharing) | figures, json_path
        )
    finally:
        torch.set_num_threads(before)


def claims(fetch: list[Row], sharing: list[Row]) -> dict[str, float]:
    """Return the headline figures: the worst over numbers of negatives and over models."""
    segmented = [row for row in fetch if row["variant"].startswith("segmented,")]
    by_name = {row["variant"]: row for row in sharing}

    def worst(label: str) -> float:
        return max(row["x_plain"] for name, row in by_name.items() if name.endswith(f": {label}"))

    return {
        "segmented_memory_saved": min(row["saved"] for row in segmented),
        "segmented_step_ratio": max(row["x_gathered"] for row in segmented),
        "segmented_vs_fused": max(row["x_fused"] for row in segmented),
        "share_k2_step_ratio": worst("128 own, k=2"),
        "share_k4_step_ratio": worst("128 own, k=4"),
        "share_k4_step_ratio_equal_logits": worst("32 own, k=4"),
        "extra_lookups": max(
            abs(row["extra_lookups"]) for name, row in by_name.items() if "128 own, k=" in name
        ),
    }
