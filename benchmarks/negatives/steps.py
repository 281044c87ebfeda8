"""Whole training steps that differ only in their negatives: their time and their memory.

The memory of a variant is read in a process of its own: by how much two steps raise the peak
resident memory over what the model and the fully touched table need. `gathered` is the common way,
a [tokens, negatives, width] tensor of rows, as in slipstream/bench/negative_memory.py; it is given
as a caller's own loss. Every process has training's allocator. Touch this when negatives can be
fetched in another way.
"""

import ctypes
import gc
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from slipstream.bench.harness import set_training_allocator
from slipstream.bench.negative_memory import CHILD_SECONDS, loss_of, peak_bytes
from slipstream.bench.step_samples import JaggedStep, batch_of
from slipstream.training.features import ITEM
from slipstream.training.recipe import Recipe

STEPS = 2
_TOUCHED_AT_ONCE = 16384  # rows
SEGMENT_BYTES = 1 << 21
VARIANTS: dict[str, dict[str, Any]] = {
    "gathered": {},
    "fused": {},
    "segmented": {"fetch": "segmented", "segment_bytes": SEGMENT_BYTES},
    "segmented fp16": {"fetch": "segmented", "segment_bytes": SEGMENT_BYTES, "precision": "fp16"},
}


def recipe_of(loss: dict[str, Any], *, dim: int = 64, length: int = 256) -> Recipe:
    """Make a recipe of two HSTU blocks over rows that are updated one by one."""
    model = {"kind": "hstu", "dim": dim, "blocks": 2, "heads": 2, "max_len": length}
    return Recipe.model_validate(
        {"name": "negatives", "model": model, "loss": loss, "tables": {"optimizer": "rowwise_adam"}}
    )


def variant_step(variant: str, items: int, *, dim: int = 64, **loss: Any) -> JaggedStep:
    """Make the step of a variant, its whole table in memory; `loss` changes keys of its loss."""
    step = JaggedStep.of(recipe_of({**VARIANTS[variant], **loss}, dim=dim), items, loss_of(variant))
    table = step.recommender.tables[ITEM]
    for keys_U in torch.arange(items).split(_TOUCHED_AT_ONCE):
        table.apply(keys_U, torch.zeros(keys_U.numel(), table.dim), 0.0)
    return step


def forget_peak() -> None:
    """Reset the peak memory, with nothing freed still held, where the system can (Linux).

    Elsewhere the peak counts from the start.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def child(variant: str, counts: list[int], lengths: list[int], items: int, threads: int) -> None:
    """Take steps with each number of negatives; prints the memory of each as JSON."""
    torch.set_num_threads(threads)
    set_training_allocator()
    batch, found = batch_of(lengths, items), []
    for negatives in counts:
        step = variant_step(variant, items, negatives=negatives)
        forget_peak()
        before = peak_bytes()
        losses = [step(batch) for _ in range(STEPS)]
        found.append(
            {"step_bytes": peak_bytes() - before, "peak_bytes": peak_bytes(), "losses": losses}
        )
        del step
    print(json.dumps(found))


def memory_of(
    variant: str, counts: list[int], lengths: list[int], items: int, threads: int
) -> dict[int, dict[str, Any]]:
    """Return one sample per number of negatives, from a process of the variant's own."""
    arguments = json.dumps([variant, counts, lengths, items, threads])
    command = [sys.executable, "-m", "benchmarks.negatives.steps", arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=CHILD_SECONDS
    )
    return dict(zip(counts, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


if __name__ == "__main__":
    child(*json.loads(sys.argv[1]))
