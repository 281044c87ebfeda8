"""Measures one version of Slipstream: reads jobs on standard input, answers each with one line.

Both versions run this file, so it uses only what both have. Touch this when another thing is timed.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import slipstream
from slipstream.bench.step_samples import JaggedStep, batch_of, movielens_like_lengths
from slipstream.config import load_recipe
from slipstream.ops.allocator import keep_freed_memory
from slipstream.ops.losses import full_softmax_loss
from slipstream.training.recipe import Recipe

STEP_ITEMS = 3_706  # of MovieLens-1M
TEMPERATURE = 0.05
SEED = 0
Values = dict[str, np.ndarray]  # by which two versions are compared


class Steps:
    """Training steps of a shipped recipe over windows as long as those of MovieLens-1M."""

    def __init__(self, recipe: str, windows: int) -> None:
        torch.manual_seed(SEED)
        self.step = JaggedStep.of(load_recipe(Recipe, recipe), STEP_ITEMS)
        longest = self.step.recommender.recipe.model.max_len
        lengths = np.minimum(movielens_like_lengths(windows), longest).tolist()
        self.batch = batch_of(lengths, STEP_ITEMS)

    def __call__(self) -> Values:
        """Take a step; return the loss before it."""
        return {"loss": np.array([self.step(self.batch)])}


class FullSoftmax:
    """The loss over a whole catalogue, its gradients with it."""

    def __init__(self, tokens: int, items: int, width: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.hidden_TD, self.rows_ND = (
            torch.nn.functional.normalize(torch.randn(count, width, generator=generator))
            for count in (tokens, items)
        )
        self.targets_T = torch.randint(0, items, (tokens,), generator=generator)

    def __call__(self) -> Values:
        """Return the losses and both gradients."""
        hidden_TD, rows_ND = (
            each.clone().requires_grad_() for each in (self.hidden_TD, self.rows_ND)
        )
        loss_T = full_softmax_loss(hidden_TD, rows_ND, self.targets_T, temperature=TEMPERATURE)
        loss_T.mean().backward()
        assert hidden_TD.grad is not None and rows_ND.grad is not None
        found = {"loss": loss_T.detach(), "hidden": hidden_TD.grad, "rows": rows_ND.grad}
        return {name: each.numpy() for name, each in found.items()}


class Product:
    """torch.mm fp32 1024^3, the peak."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.a, self.b = (torch.randn(1024, 1024, generator=generator) for _ in range(2))

    def __call__(self) -> Values:
        """Ten products."""
        for _ in range(10):
            torch.mm(self.a, self.b)
        return {}


KINDS: dict[str, Any] = {"steps": Steps, "softmax": FullSoftmax, "product": Product}


def main(tree: str, threads: str) -> None:
    """Answer jobs until the input ends; `tree` is where this version must come from."""
    assert Path(slipstream.__file__).is_relative_to(Path(tree)), slipstream.__file__
    torch.set_num_threads(int(threads))
    keep_freed_memory()
    made: dict[str, Any] = {}
    for line in sys.stdin:
        job = json.loads(line)
        name, kind, sizes, count = job["name"], job["kind"], job["sizes"], job["count"]
        if name not in made:
            made[name] = KINDS[kind](**sizes)
        seconds, values = [], []
        for _ in range(count):
            begin = time.perf_counter()
            values.append(made[name]())
            seconds.append(time.perf_counter() - begin)
        if job["save_to"]:
            np.savez(job["save_to"], **values[0])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
