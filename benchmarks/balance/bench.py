"""How long ranks wait for the slowest one, with and without balancing.

Real and synthetic lengths, predicted FLOPs, random global batches with a fixed number of sequences
per rank; every variant gets the same batches. `imbalance` is the mean over steps of (slowest -
mean) / slowest. `floor` is what no assignment can beat without cutting a sequence: where it is
high, one sequence costs more than a rank's fair share, and only more sequences per rank, or a cap,
would help.

Real lengths come from the folders of `$SLIPSTREAM_DATA` (default `data`): prepared stores or raw
downloads of ml-1m, ml-latest-small and kuairand-pure; the output names those that are absent. The
last rows are measured by the clock on two real ranks (ranks.py). Touch this when batches can be
shared in another way.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.balance import ranks as balance_ranks
from slipstream.bench.harness import describe, note
from slipstream.bench.history_lengths import real_lengths
from slipstream.data.balance import Balance, Cost, assign, imbalance
from slipstream.data.synthetic import Synthetic, draw_lengths, with_lengths
from slipstream.files import write_json

PER_RANK, MANY_PER_RANK = 8, 64
RANKS = (2, 8, 64)
STEPS, QUICK_STEPS = 50, 5
UNCAPPED = "synthetic KuaiRand-1K"
LONG = 4096  # the cap of the `long` sizes
DIM, HEADS, HEAD_DIM = 512, 8, 64
VARIANTS: dict[str, tuple[Balance, bool]] = {
    "fixed count (baseline)": ("none", False),
    "token share": ("none", True),
    "lpt": ("lpt", False),
    "karmarkar_karp": ("karmarkar_karp", False),
}


def settings() -> dict[str, np.ndarray | None]:
    """Return every kind of lengths; the first two, which carry the claims, are synthetic."""
    drawn = draw_lengths(with_lengths(Synthetic(), "kuairand-1k"), 50_000, np.random.default_rng(0))
    found: dict[str, np.ndarray | None] = {
        f"synthetic KuaiRand-1K, cap {LONG:,}": np.minimum(drawn, LONG),
        UNCAPPED: drawn,
    }
    for name in ("ml-1m", "ml-latest-small", "kuairand-pure"):
        found[name] = real_lengths(name)
    ml = found["ml-1m"]
    found["ml-1m, cap 200"] = np.minimum(ml, 200) if ml is not None else None
    return found


def measure(
    lengths: np.ndarray, world_size: int, per_rank: int, steps: int, cost: Cost
) -> list[dict[str, Any]]:
    """Compute the imbalance of every variant over the same random batches."""
    generator = np.random.default_rng(world_size)
    batches = [
        lengths[generator.integers(0, lengths.size, per_rank * world_size)] for _ in range(steps)
    ]
    floors, rows = [], []
    for batch in batches:
        costs = cost(batch)
        slowest = max(float(costs.max()), float(costs.sum()) / world_size)
        floors.append((slowest - float(costs.sum()) / world_size) / slowest)
    for variant, (balance, by_tokens) in VARIANTS.items():
        waits, ratios, spent = [], [], []
        for batch in batches:
            begin = time.perf_counter()
            ranks = assign(batch, world_size, balance=balance, cost=cost, by_tokens=by_tokens)
            spent.append(time.perf_counter() - begin)
            waits.append(imbalance(cost(batch), ranks, world_size))
            ratios.append(1.0 / (1.0 - waits[-1]))
        rows.append(
            {
                "variant": variant,
                "ranks": world_size,
                "per_rank": per_rank,
                "imbalance": float(np.mean(waits)),
                "max_over_mean": float(np.mean(ratios)),
                "floor": float(np.mean(floors)),
                "milliseconds": 1e3 * median(spent),
                "samples": waits,
            }
        )
    return rows


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table, write the JSON if a path is given."""
    steps = QUICK_STEPS if quick else STEPS
    cost = Cost.of_hstu(DIM, HEADS, HEAD_DIM, HEAD_DIM)
    rows, absent = [], []
    for name, lengths in settings().items():
        if lengths is None:
            absent.append(name)
            continue
        note(f"sharing {name}")
        for per_rank in (PER_RANK, MANY_PER_RANK) if name == UNCAPPED else (PER_RANK,):
            for world_size in RANKS:
                rows += [
                    {"lengths": name} | row
                    for row in measure(lengths, world_size, per_rank, steps, cost)
                ]
    note("measuring two real ranks")
    measured = balance_ranks.measure(quick)
    result = describe("balance") | {
        "threads": 1,
        "model": {"dim": DIM, "heads": HEADS, "dqk": HEAD_DIM, "dv": HEAD_DIM, "steps": steps},
        "absent": absent,
        "measured": {key: value for key, value in measured.items() if key != "rows"},
        "rows": rows + [{"lengths": "two real ranks"} | row for row in measured["rows"]],
        "claims": _claims(rows)
        | {name: measured[name] for name in ("imbalance_measured", "imbalance_measured_baseline")},
    }
    _print(result, rows)
    balance_ranks.show(measured)
    if json_path is not None:
        write_json(json_path, result)
    return result


def _claims(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compare LPT with fixed counts on the capped synthetic lengths, 2 ranks and 64."""
    found = {(row["lengths"], row["ranks"], row["variant"]): row["imbalance"] for row in rows}
    lengths = rows[0]["lengths"]
    return {
        "imbalance_flops": found[lengths, 2, "lpt"],
        "imbalance_flops_baseline": found[lengths, 2, "fixed count (baseline)"],
        "imbalance_64_ranks": found[lengths, 64, "lpt"],
        "imbalance_64_ranks_baseline": found[lengths, 64, "fixed count (baseline)"],
    }


def _print(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    model = result["model"]
    title = (
        f"ranks waiting for the slowest: predicted FLOPs of HSTU {DIM} wide, {model['steps']} steps"
    )
    table = Table(title=title)
    for heading in (
        "lengths",
        "ranks",
        "per rank",
        "sharing",
        "imbalance",
        "max/mean",
        "floor",
        "ms a batch",
    ):
        table.add_column(heading, justify="left" if heading in ("lengths", "sharing") else "right")
    for row in rows:
        figures = (
            f"{row['imbalance']:.2%}",
            f"{row['max_over_mean']:.3f}",
            f"{row['floor']:.2%}",
            f"{row['milliseconds']:.2f}",
        )
        table.add_row(
            row["lengths"], str(row["ranks"]), str(row["per_rank"]), row["variant"], *figures
        )
    console.print(table)
    if result["absent"]:
        console.print(
            f"not at hand, so left out: {', '.join(result['absent'])} (name their folder in "
            "$SLIPSTREAM_DATA)"
        )
