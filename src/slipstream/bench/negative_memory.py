"""How much memory 128 negatives a token cost in a training step, fused and gathered.

Fused is our loss; gathered makes a row for each negative. Each variant runs in a process of its own
and reports by how much its steps raised the peak resident memory above what model, tables and batch
need. Everything but the loss is the same, the allocator's setting is training's. Touch this when
the common way of gathering changes.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

from slipstream.bench.harness import set_training_allocator
from slipstream.bench.step_samples import JaggedStep, batch_of
from slipstream.config import load_recipe
from slipstream.training.objective import RetrievalLossInputs
from slipstream.training.own_functions import LossFunction
from slipstream.training.recipe import Recipe

CHILD_SECONDS = 600
STEPS = 2
VARIANTS = ("fused", "gathered")


def gathered_softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    """Compute sampled softmax the common way, with [S, R, D] rows in memory."""
    assert inputs.negatives is not None
    rows_SRD = inputs.rows_UD[inputs.negatives]
    positive_S1 = (inputs.hidden_SD * inputs.rows_UD[inputs.targets_S]).sum(
        -1, keepdim=True
    ) / inputs.temperature
    negative_SR = torch.einsum("sd,srd->sr", inputs.hidden_SD, rows_SRD) / inputs.temperature
    negative_SR = negative_SR.masked_fill(
        inputs.negatives == inputs.targets_S.unsqueeze(1), float("-inf")
    )
    return torch.cat([positive_S1, negative_SR], dim=1).logsumexp(1) - positive_S1.squeeze(1)


def loss_of(variant: str) -> LossFunction | None:
    """Return the loss that a variant is trained with; None is the recipe's."""
    return gathered_softmax if variant == "gathered" else None


def peak_bytes() -> int:
    """Return the peak resident memory of this process.

    Linux hands ru_maxrss of a parent down to its children, so VmHWM is read there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if lines:
            return int(lines[0].split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def child(variant: str, lengths: list[int], num_items: int, threads: int) -> None:
    """Run some steps of the ML-1M recipe in this process; prints the memory as JSON."""
    torch.set_num_threads(threads)
    set_training_allocator()
    recipe = load_recipe(Recipe, "ml-1m-hstu")
    step = JaggedStep.of(recipe, num_items, loss_of(variant))
    batch = batch_of(lengths, num_items)
    before = peak_bytes()
    losses = [step(batch) for _ in range(STEPS)]
    print(
        json.dumps(
            {"step_bytes": peak_bytes() - before, "peak_bytes": peak_bytes(), "losses": losses}
        )
    )


def measure(
    lengths: list[int], num_items: int, threads: int, repeats: int
) -> dict[str, list[dict[str, float]]]:
    """Return samples of every variant, in turns, each from its own process."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(repeats):
        for variant in VARIANTS:
            command = [
                sys.executable,
                "-m",
                "slipstream.bench.negative_memory",
                variant,
                json.dumps([lengths, num_items, threads]),
            ]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=CHILD_SECONDS
            )
            samples[variant].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return samples


if __name__ == "__main__":
    child(sys.argv[1], *json.loads(sys.argv[2]))
