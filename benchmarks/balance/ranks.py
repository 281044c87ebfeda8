"""How long two real ranks wait for each other, with and without balancing, measured by the clock.

Two processes of one thread each (pinned to a core where the system allows it), joined by gloo over
loopback. A step is: look up rows, forward, backward of the summed loss, then one all-reduce of the
dense gradients together with the count of supervised tokens, whose quotient is the gradient of the
global mean. Histories have synthetic KuaiRand-1K lengths, cut to a cap.

Costs are fitted before anything is measured, on lengths and items of their own: both ranks time
single histories of a few lengths, and least squares on relative errors gives seconds = constant +
linear n + quadratic n^2. The constant belongs to a step, not to a history, so it is left out.
Every step is repeated with the variants in turns, under training's allocator; a rank's compute time
is the median of its repeats. Touch this when a step of several ranks does something else.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.local_ranks import run_ranks
from slipstream.bench.harness import set_training_allocator
from slipstream.bench.step_samples import batch_of
from slipstream.data.balance import Balance, Cost, assign, imbalance, share_batch
from slipstream.data.batch import JaggedBatch
from slipstream.data.synthetic import Synthetic, draw_lengths, with_lengths
from slipstream.training.features import Features
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender

WORLD = 2
ITEMS = 5_000
VARIANTS: dict[str, Balance] = {"fixed count (baseline)": "none", "lpt": "lpt"}


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    cap: int = 4096
    per_rank: int = 8
    steps: int = 10
    repeats: int = 3
    dim: int = 128
    heads: int = 2
    blocks: int = 2
    seconds_allowed: int = 1800

    def recipe(self) -> Recipe:
        model = {
            "kind": "hstu",
            "dim": self.dim,
            "heads": self.heads,
            "blocks": self.blocks,
            "max_len": self.cap,
        }
        return Recipe.model_validate({"name": "balance", "model": model, "loss": {"negatives": 32}})

    def lengths(self) -> np.ndarray:
        """Draw the lengths of every global batch, [steps, ranks * per_rank]."""
        drawn = draw_lengths(
            with_lengths(Synthetic(), "kuairand-1k"),
            self.steps * WORLD * self.per_rank,
            np.random.default_rng(7),
        )
        return np.minimum(drawn, self.cap).reshape(self.steps, -1)


QUICK = Setting(cap=2048, steps=3)


def gradient_of_sum(recommender: Recommender, batch: JaggedBatch, step: int) -> torch.Tensor:
    """The dense gradient of the batch's summed loss, flat, with the count of its supervised tokens
    at the end.
    """
    plan = recommender.plan_step(batch, step)
    loss, count = recommender.loss(recommender.read(plan)), plan.count
    loss.backward()
    parameters = list(recommender.model.parameters())
    parts = [
        torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters
    ]
    recommender.model.zero_grad(set_to_none=True)
    return torch.cat([*parts, parts[0].new_tensor([count])])


def global_mean(summed: torch.Tensor) -> torch.Tensor:
    """Divide the sum over ranks by its count: the gradient of the step's mean loss."""
    return summed[:-1] / summed[-1]


class Rank:
    """One of the two processes."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank = setting, rank
        self.recommender = Recommender(setting.recipe(), Features(ITEMS))

    def compute(self, batch: JaggedBatch, step: int) -> tuple[torch.Tensor, float, float]:
        """Compute the gradient; returns its seconds by the clock and by processor time."""
        begin, cpu = time.perf_counter(), time.process_time()
        gradient = gradient_of_sum(self.recommender, batch, step)
        return gradient, time.perf_counter() - begin, time.process_time() - cpu

    def fit_cost(self) -> Cost:
        """Fit linear and quadratic seconds of a history, timed on all ranks at once."""
        lengths = np.array([max(8, self.setting.cap * part // 8) for part in (1, 2, 3, 4, 6, 8)])
        best = np.full(lengths.size, np.inf)
        for repeat in range(1 + self.setting.repeats):
            for place, length in enumerate(lengths):
                dist.barrier()
                _, _, seconds = self.compute(
                    batch_of([int(length)], ITEMS, seed=10_000 + place, first_user=10**6), 0
                )
                if repeat:
                    best[place] = min(best[place], seconds)
        everyone = torch.from_numpy(best)
        dist.all_reduce(everyone)
        return fit_cost(lengths, everyone.numpy() / WORLD)

    def part_of(
        self, whole: JaggedBatch, lengths: np.ndarray, balance: Balance, cost: Cost
    ) -> JaggedBatch:
        """Take this rank's users of a batch."""
        users = share_batch(lengths, self.rank, WORLD, balance=balance, cost=cost, by_tokens=False)
        return whole.take(torch.from_numpy(users))

    def run_steps(self, cost: Cost) -> list[dict[str, Any]]:
        """Time this rank's steps: a list over the repeats per step and variant."""
        found = []
        for step, lengths in enumerate(self.setting.lengths()):
            whole = batch_of(lengths.tolist(), ITEMS, seed=step)
            mine = {
                name: self.part_of(whole, lengths, balance, cost)
                for name, balance in VARIANTS.items()
            }
            for repeat in range(self.setting.repeats + (step == 0)):
                for name, batch in mine.items():
                    dist.barrier()
                    begin = time.perf_counter()
                    gradient, seconds, cpu_seconds = self.compute(batch, step)
                    dist.all_reduce(gradient)
                    global_mean(gradient)
                    whole_step = time.perf_counter() - begin
                    if step or repeat:  # the very first round warms up
                        taken = {"compute": seconds, "cpu": cpu_seconds, "step_seconds": whole_step}
                        found.append({"variant": name, "step": step} | taken)
        return found

    def gradient_error(self, dtype: torch.dtype) -> float:
        """Compare the balanced ranks' mean gradient with that of one rank, on a short batch.

        Returns the largest difference over the largest gradient.
        """
        recommender = Recommender(self.setting.recipe(), Features(ITEMS), dtype=dtype)
        lengths = np.minimum([60, 3, 17, 41, 1, 25], self.setting.cap)
        whole, cost = batch_of(lengths.tolist(), ITEMS, seed=99), Cost(1.0, 0.1)
        mine = self.part_of(whole, lengths, "lpt", cost)
        summed = gradient_of_sum(recommender, mine, 5)
        dist.all_reduce(summed)
        alone = global_mean(gradient_of_sum(recommender, whole, 5))
        return float((global_mean(summed) - alone).abs().max() / alone.abs().max())


def fit_cost(lengths: np.ndarray, seconds: np.ndarray) -> Cost:
    """Fit by least squares on relative errors; a negative coefficient is left out."""
    columns = np.stack(
        [np.ones(lengths.size), lengths.astype(np.float64), lengths.astype(np.float64) ** 2], axis=1
    )
    used = [0, 1, 2]
    while True:
        solution, *_ = np.linalg.lstsq(
            columns[:, used] / seconds[:, None], np.ones(lengths.size), rcond=None
        )
        if solution.min() >= 0 or len(used) == 1:
            break
        used.pop(int(solution.argmin()))
    found = dict(zip(used, solution.tolist(), strict=True))
    cost = Cost(max(0.0, found.get(1, 0.0)), max(0.0, found.get(2, 0.0)))
    return cost if cost.linear + cost.quadratic > 0 else Cost(1.0, 0.0)


def child(rank: int, meeting: str, setting: Setting) -> None:
    """Run one rank; rank 0 prints all ranks' times as JSON."""
    torch.set_num_threads(1)
    set_training_allocator()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = len(cpus) >= WORLD
    if pinned:
        os.sched_setaffinity(0, {cpus[rank]})
    patience = timedelta(seconds=setting.seconds_allowed)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=patience
    )
    try:
        me = Rank(setting, rank)
        errors = {
            "fp32": me.gradient_error(torch.float32),
            "fp64": me.gradient_error(torch.float64),
        }
        cost = me.fit_cost()
        everybody: list[Any] = [None] * WORLD
        dist.all_gather_object(everybody, me.run_steps(cost))
        if rank == 0:
            print(
                json.dumps(
                    {
                        "cost": asdict(cost),
                        "gradient_error": errors,
                        "pinned": pinned,
                        "ranks": everybody,
                    }
                )
            )
    finally:
        dist.destroy_process_group()


def launch(setting: Setting) -> dict[str, Any]:
    """Run both ranks and return their times."""
    with tempfile.TemporaryDirectory(prefix="slipstream-balance-") as scratch:
        arguments = [str(Path(scratch) / "meeting"), json.dumps(asdict(setting))]
        return run_ranks(
            "benchmarks.balance.ranks",
            arguments,
            world=WORLD,
            seconds_allowed=setting.seconds_allowed,
        )


def figures(name: str, ranks: list[list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Compute the imbalance of one variant: per step (slowest - mean) / step time."""
    waits, cpu_waits, step_seconds = [], [], []
    for step in range(steps):
        taken = [
            [entry for entry in rank if entry["variant"] == name and entry["step"] == step]
            for rank in ranks
        ]
        compute_R, cpu_R, whole_R = (
            np.array([np.median([entry[key] for entry in entries]) for entries in taken])
            for key in ("compute", "cpu", "step_seconds")
        )
        waits.append(float((compute_R.max() - compute_R.mean()) / whole_R.max()))
        cpu_waits.append(float((cpu_R.max() - cpu_R.mean()) / cpu_R.max()))
        step_seconds.append(float(whole_R.max()))
    return {
        "variant": name,
        "imbalance": float(np.mean(waits)),
        "imbalance_cpu": float(np.mean(cpu_waits)),
        "step_seconds": float(np.median(step_seconds)),
        "samples": waits,
        "cpu_samples": cpu_waits,
    }


def measure(quick: bool = False, setting: Setting | None = None) -> dict[str, Any]:
    """Return rows and headline figures of both variants.

    `imbalance_predicted` is what the fitted cost predicts for the same batches.
    """
    setting = setting or (QUICK if quick else Setting())
    found = launch(setting)
    cost = Cost(**found["cost"])
    rows = []
    for name, balance in VARIANTS.items():
        shares = [
            (cost(lengths), assign(lengths, WORLD, balance=balance, cost=cost))
            for lengths in setting.lengths()
        ]
        predicted = float(np.mean([imbalance(costs, ranks, WORLD) for costs, ranks in shares]))
        rows.append(
            figures(name, found["ranks"], setting.steps) | {"imbalance_predicted": predicted}
        )
    return {
        "setting": asdict(setting),
        "cost": found["cost"],
        "pinned": found["pinned"],
        "gradient_error": found["gradient_error"],
        "rows": rows,
        "imbalance_measured": rows[1]["imbalance"],
        "imbalance_measured_baseline": rows[0]["imbalance"],
    }


def show(found: dict[str, Any]) -> None:
    """Print what `measure` found."""
    setting, error = found["setting"], found["gradient_error"]
    title = (
        f"two real ranks, {setting['per_rank']} histories each of synthetic KuaiRand-1K "
        f"lengths cut to {setting['cap']:,}"
    )
    table = Table(title=f"{title}: {setting['steps']} steps, medians of {setting['repeats']}")
    for heading in ("sharing", "imbalance", "by cpu time", "predicted", "step s"):
        table.add_column(heading, justify="left" if heading == "sharing" else "right")
    for row in found["rows"]:
        waits = (f"{row[key]:.2%}" for key in ("imbalance", "imbalance_cpu", "imbalance_predicted"))
        table.add_row(row["variant"], *waits, f"{row['step_seconds']:.2f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"balanced gradient against one rank's: {error['fp32']:.1e} in fp32, {error['fp64']:.1e} "
        "in fp64 (relative)"
    )


if __name__ == "__main__":
    child(int(sys.argv[1]), sys.argv[2], Setting(**json.loads(sys.argv[3])))
