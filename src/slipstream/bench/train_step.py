"""How much of the machine a whole training step uses, and the ML-1M step against padded PyTorch.

A step is all of it: row lookup, model, loss with 128 sampled negatives, backward, update of rows
and dense weights. `mfu` is model FLOPs (models/flops.py) over time and peak; the peak is the best
sample of torch.mm fp32 1024^3 in the whole run, with the same threads, taken before and after every
step. Histories have the full length of their size. `mfu_cpu` uses processor seconds instead of the
clock; it is steadier on a machine that others use too. `mfu_median_peak` is the rule before: it
divides by the median sample.

The ML-1M step has 128 histories with MovieLens-1M's lengths: from `ml-1m` in a folder of
`$SLIPSTREAM_DATA` (default `data`), or drawn like them; the output names which. Its claim is
against the faster padded baseline, which leaves padding out of the loss as the research recipe
does. The allocator keeps freed memory on both sides, as in training; `page_faults` counts the pages
that a step had to map all the same. `--quick` takes fewer repeats, small sizes, and one block of
each long model. Touch this when a step does more, or another size should be measured.
"""

import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from slipstream.bench import negative_memory
from slipstream.bench.harness import (
    describe,
    matmul_peak,
    median,
    note,
    set_training_allocator,
    spread,
)
from slipstream.bench.history_lengths import real_lengths
from slipstream.bench.padded_baseline import PaddedBatch, PaddedStep
from slipstream.bench.step_samples import JaggedStep, batch_of, movielens_like_lengths
from slipstream.config import load_recipe
from slipstream.files import write_json
from slipstream.models.build import dense_parameters
from slipstream.models.flops import training_flops
from slipstream.training.recipe import Recipe

THREADS = 2
NEGATIVES = 128
ITEMS = 20_000
MOVIELENS_ITEMS, MOVIELENS_USERS, MOVIELENS_LENGTH = 3_706, 128, 200
STEPS_A_TURN = 3  # that count, of the ML-1M variants, behind one that does not
PEAK_PRODUCTS = 10  # a sample of the peak


@dataclass(frozen=True)
class Shape:
    """One row of the table: a named size, the histories of a step, the repeats."""

    kind: str
    size: str
    sequences: int
    repeats: int
    blocks: int | None = None  # None: as many as the size has

    @property
    def name(self) -> str:
        """The name of the row."""
        return f"{self.kind}-{self.size}"

    def recipe(self) -> Recipe:
        """Make the recipe of this size."""
        model: dict[str, Any] = {"kind": self.kind, "size": self.size}
        if self.blocks is not None:
            model["blocks"] = self.blocks
        return Recipe.model_validate(
            {"name": self.name, "model": model, "loss": {"negatives": NEGATIVES}}
        )


FULL = [
    Shape(kind, size, sequences, repeats)
    for size, sequences, repeats in (
        ("tiny", 8, 5),
        ("small", 4, 5),
        ("medium", 2, 5),
        ("large", 1, 3),
        ("long", 1, 3),
    )
    for kind in ("hstu", "fuxi")
]
QUICK = [
    Shape(kind, size, 1, 2, blocks)
    for size, blocks in (("tiny", None), ("small", None), ("long", 1))
    for kind in ("hstu", "fuxi")
]


@dataclass(frozen=True)
class Sample:
    """One timed run: seconds by the clock, processor seconds of all threads, pages mapped."""

    seconds: float
    cpu_seconds: float
    value: float
    page_faults: int = 0


def timed(work: Callable[[], float]) -> Sample:
    """Run work once and time it."""
    faults = page_faults()
    begin, cpu = time.perf_counter(), time.process_time()
    value = work()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return Sample(seconds, cpu_seconds, value, page_faults() - faults)


def page_faults() -> int:
    """Return how many pages were mapped into this process so far, without any I/O."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Peak:
    """The machine's matrix-product speed, sampled throughout a run."""

    def __init__(self) -> None:
        self.product, self.flops = matmul_peak()
        self.samples: list[Sample] = []
        self._products()

    def _products(self) -> float:
        for _ in range(PEAK_PRODUCTS):
            self.product()
        return 0.0

    def sample(self) -> Sample:
        """`value` is FLOPs a second; by processor time it is `value * seconds / cpu_seconds`."""
        taken = timed(self._products)
        speed = PEAK_PRODUCTS * self.flops / taken.seconds
        self.samples.append(Sample(taken.seconds, taken.cpu_seconds, speed))
        return self.samples[-1]


def measure_shape(shape: Shape, peak: Peak) -> dict[str, Any]:
    """Measure steps of one named size: one to warm up, then some between samples of the peak."""
    recipe = shape.recipe()
    lengths = [recipe.model.max_len] * shape.sequences
    step, batch = JaggedStep.of(recipe, ITEMS), batch_of(lengths, ITEMS)
    flops = training_flops(recipe.model, lengths, negatives=NEGATIVES)
    losses, samples, peaks = [step(batch)], [], [peak.sample()]
    for _ in range(shape.repeats):
        samples.append(timed(lambda: step(batch)))
        peaks.append(peak.sample())
        losses.append(samples[-1].value)
    row = {
        "variant": shape.name,
        "dense_parameters": dense_parameters(step.recommender.model),
        "blocks": recipe.model.blocks,
        "sequences": shape.sequences,
        "length": recipe.model.max_len,
        "tokens": batch.num_tokens,
        "flops": flops,
        "losses": losses,
    }
    return row | step_figures(flops, samples, peaks)


def step_figures(flops: int, samples: list[Sample], peaks: list[Sample]) -> dict[str, Any]:
    """Compute medians and spread of timed steps; `add_mfu` adds what the whole run decides."""
    seconds = [sample.seconds for sample in samples]
    peak = median([sample.value for sample in peaks])
    return {
        "seconds": median(seconds),
        "spread": spread(seconds),
        "gflops": flops / median(seconds) / 1e9,
        "mfu_median_peak": flops / median(seconds) / peak,
        "page_faults": median([sample.page_faults for sample in samples]),
        "samples": seconds,
        "cpu_samples": [sample.cpu_seconds for sample in samples],
        "peak_samples": [sample.value / 1e9 for sample in peaks],
    }


def add_mfu(rows: list[dict[str, Any]], peaks: list[Sample]) -> None:
    """Add the MFU of every row, by the clock and by processor time, against the best sample."""
    best = max(sample.value for sample in peaks)
    best_by_cpu = max(sample.value * sample.seconds / sample.cpu_seconds for sample in peaks)
    for row in rows:
        row["mfu"] = row["flops"] / row["seconds"] / best
        row["mfu_cpu"] = row["flops"] / median(row["cpu_samples"]) / best_by_cpu
        row["peak_gflops"] = best / 1e9


def movielens_lengths() -> tuple[list[int], str]:
    """Return training windows of 128 users, and where their lengths come from."""
    known = real_lengths("ml-1m")
    source = "MovieLens-1M" if known is not None else "drawn like MovieLens-1M"
    lengths = movielens_like_lengths(100_000) if known is None else known
    chosen = np.random.default_rng(1).choice(lengths, MOVIELENS_USERS, replace=False)
    # Two behaviours are held out, and the last of the rest is only a target.
    return np.minimum(chosen - 3, MOVIELENS_LENGTH).clip(min=1).tolist(), source


def measure_movielens(repeats: int, peak: Peak) -> list[dict[str, Any]]:
    """Measure the ML-1M step, ours and padded, in turns."""
    lengths, source = movielens_lengths()
    recipe, batch = load_recipe(Recipe, "ml-1m-hstu"), batch_of(lengths, MOVIELENS_ITEMS)
    rectangles = PaddedBatch.of(batch, MOVIELENS_LENGTH)
    ours = JaggedStep.of(recipe, MOVIELENS_ITEMS)
    padded, kinder = (
        PaddedStep(recipe, MOVIELENS_ITEMS),
        PaddedStep(recipe, MOVIELENS_ITEMS, "real"),
    )
    variants: dict[str, Callable[[], float]] = {
        "ml-1m jagged": lambda: ours(batch),
        "ml-1m padded": lambda: padded(rectangles),
        "ml-1m padded, loss at real positions": lambda: kinder(rectangles),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    peaks = []
    for repeat in range(repeats + 1):
        for name, step in variants.items():
            gc.collect()
            step()  # what another variant left in caches is not this one's cost: training repeats
            turn = [timed(step) for _ in range(STEPS_A_TURN)]
            if repeat:
                samples[name] += turn
        peaks.append(peak.sample())
    flops = training_flops(recipe.model, lengths, negatives=recipe.loss.negatives)
    shared: dict[str, Any] = {
        "lengths": source,
        "tokens": batch.num_tokens,
        "sequences": len(lengths),
        "length": MOVIELENS_LENGTH,
        "flops": flops,
    }
    rows: list[dict[str, Any]] = [
        {"variant": name} | shared | step_figures(flops, several, peaks)
        for name, several in samples.items()
    ]
    for row in rows:
        row["x_over"] = row["seconds"] / rows[0]["seconds"]
        row["x_over_cpu"] = median(row["cpu_samples"]) / median(rows[0]["cpu_samples"])
    return rows


def measure_memory(repeats: int) -> list[dict[str, Any]]:
    """Measure what 128 negatives a token add to the peak memory, fused and gathered."""
    lengths, source = movielens_lengths()
    found = negative_memory.measure(lengths, MOVIELENS_ITEMS, torch.get_num_threads(), repeats)
    return [
        {
            "variant": f"memory, negatives {name}",
            "lengths": source,
            "step_bytes": median([sample["step_bytes"] for sample in several]),
            "peak_bytes": median([sample["peak_bytes"] for sample in several]),
            "samples": [sample["step_bytes"] for sample in several],
        }
        for name, several in found.items()
    ]


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print tables, write the JSON if a path is given."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    try:
        freed_memory = set_training_allocator()
        peak, load = Peak(), os.getloadavg()[0]
        note("measuring the ML-1M step against padded PyTorch")
        steps = measure_movielens(3 if quick else 7, peak)
        note("measuring the memory of negatives")
        memory = measure_memory(1 if quick else 5)
        sizes = []
        for shape in QUICK if quick else FULL:
            note(f"measuring a whole step of {shape.name}")
            sizes.append(measure_shape(shape, peak))
            gc.collect()
        add_mfu([*sizes, *steps], peak.samples)
        result = describe("train-step") | {
            "load": load,
            "freed_memory": freed_memory,
            "quick": quick,
            "rows": [*sizes, *steps, *memory, *([] if quick else [loss_row(sizes)])],
            "claims": claims(sizes, steps, memory),
        }
    finally:
        torch.set_num_threads(before)
    _print(result, sizes, steps, memory)
    if json_path is not None:
        write_json(json_path, result)
    return result


def loss_row(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses of the full FuXi-long at the first and the last step."""
    losses = next(row["losses"] for row in sizes if row["variant"] == "fuxi-long")
    return {
        "variant": "fuxi-long loss",
        "fuxi_long_loss_first": losses[0],
        "fuxi_long_loss_last": losses[-1],
        "samples": losses,
    }


def claims(
    sizes: list[dict[str, Any]], steps: list[dict[str, Any]], memory: list[dict[str, Any]]
) -> dict[str, float]:
    """Return the headline figures."""
    mfu = {row["variant"]: row["mfu"] for row in sizes}
    return {
        "mfu_hstu_long": mfu["hstu-long"],
        "mfu_fuxi_long": mfu["fuxi-long"],
        "x_over_padded_ml1m": min(row["x_over"] for row in steps[1:]),
        "negative_memory_saved": 1.0 - memory[0]["step_bytes"] / memory[1]["step_bytes"],
    }


def _print(
    result: dict[str, Any],
    sizes: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    memory: list[dict[str, Any]],
) -> None:
    console = Console(highlight=False)
    table = Table(
        title=f"whole training step, {result['threads']} threads, fp32, {NEGATIVES} negatives, "
        f"{ITEMS:,} items"
    )
    for heading in (
        "model",
        "dense",
        "batch",
        "TFLOP",
        "step s",
        "GF/s of",
        "mfu",
        "by cpu",
        "loss",
    ):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in sizes:
        table.add_row(
            row["variant"],
            f"{row['dense_parameters'] / 1e6:.2f}M",
            f"{row['sequences']}x{row['length']}",
            f"{row['flops'] / 1e12:.3f}",
            f"{row['seconds']:.2f}±{row['spread']:.0%}",
            f"{row['gflops']:.0f}/{row['peak_gflops']:.0f}",
            *(
                f"{row['mfu']:.3f}",
                f"{row['mfu_cpu']:.3f}",
                f"{row['losses'][0]:.1f}>{row['losses'][-1]:.1f}",
            ),
        )
    console.print(table)
    _print_movielens(console, steps, memory)
    for name, value in result["claims"].items():
        console.print(f"{name}: {value:.3f}")
    if result["quick"]:
        console.print("quick: the long models were measured with one of their 16 blocks")


def _print_movielens(
    console: Console, steps: list[dict[str, Any]], memory: list[dict[str, Any]]
) -> None:
    title = (
        f"ML-1M HSTU base step: {steps[0]['sequences']} histories, {steps[0]['tokens']:,} "
        f"tokens, lengths {steps[0]['lengths']}"
    )
    table = Table(title=title)
    for heading in ("variant", "step ms", "spread", "mfu", "x", "x by cpu", "page faults"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in steps:
        figures = (
            f"{1e3 * row['seconds']:.1f}",
            f"{row['spread']:.0%}",
            f"{row['mfu']:.3f}",
            f"{row['x_over']:.2f}",
        )
        by_cpu, faults = f"{row['x_over_cpu']:.2f}", f"{row['page_faults']:,.0f}"
        table.add_row(row["variant"], *figures, by_cpu, faults)
    console.print(table)
    for row in memory:
        console.print(
            f"{row['variant']}: +{row['step_bytes'] / 2**20:,.0f} MB in a step, "
            f"{row['peak_bytes'] / 2**20:,.0f} MB in all"
        )
