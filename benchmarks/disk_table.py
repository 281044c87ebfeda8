"""A disk table ten times its memory budget in training: resident memory, and rows after reopening.

Every step reads 20,000 distinct rows (half by Zipf's law, half uniform) and updates them, until
more rows are updated than the cache holds, under training's allocator, which keeps freed memory.
Then the table is flushed and opened again, and a sample of rows is compared with what training
left. Touch this when the disk table keeps more in memory.
"""

import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from benchmarks.command import run_measurement
from slipstream.bench import harness
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.row_optimizers import RowwiseAdam

DIM, STEP_ROWS = 128, 20_000
FULL, QUICK = (
    (10_000_000, 1 << 30),
    (200_000, 21 << 20),
)  # rows and cache bytes; a row with its state is 1,040 bytes
UPDATED_OVER_CACHE = 1.3  # train until this many times the cache's rows are updated


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _keys(rng: np.random.Generator, num_rows: int, count: int) -> torch.Tensor:
    zipf = (rng.zipf(1.2, count // 2) * 2_654_435_761) % num_rows
    return torch.from_numpy(
        np.union1d(zipf, rng.integers(0, num_rows, count // 2)).astype(np.int64)
    )


class Training:
    """The steps, and what is measured of them."""

    def __init__(self, table: DiskTable, num_rows: int, step_rows: int) -> None:
        self.table, self.num_rows, self.step_rows = table, num_rows, step_rows
        self.rng = np.random.default_rng(0)
        self.seconds: list[float] = []
        self.updated = np.zeros(num_rows, dtype=bool)
        self.start, self.peak = resident_bytes(), 0

    def step(self) -> None:
        """Gather rows, apply a gradient that pulls them to zero."""
        keys_U = _keys(self.rng, self.num_rows, self.step_rows)
        begin = time.perf_counter()
        weights_UD = self.table.gather(keys_U)
        self.table.apply(keys_U, weights_UD, 1e-3)
        self.seconds.append(time.perf_counter() - begin)
        self.updated[keys_U.numpy()] = True
        self.peak = max(self.peak, resident_bytes())

    def run(self, rows_to_update: int) -> None:
        """Take steps until this many rows are updated."""
        with Progress(transient=True) as progress:
            task = progress.add_task("training", total=rows_to_update)
            while self.updated.sum() < rows_to_update:
                self.step()
                progress.update(task, completed=int(self.updated.sum()))


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Train, flush and reopen; print resident memory, the budget and the size of the table."""
    (num_rows, budget), step_rows = (QUICK, 2_000) if quick else (FULL, STEP_ROWS)
    harness.set_training_allocator()
    start = resident_bytes()
    # In the working directory: the system's temporary one may be in memory.
    with tempfile.TemporaryDirectory(prefix=".slipstream-bench-", dir=os.getcwd()) as directory:
        table = DiskTable("item", num_rows, DIM, RowwiseAdam(), directory, cache_bytes=budget)
        training = Training(table, num_rows, step_rows)
        training.run(int(UPDATED_OVER_CACHE * table.cache_rows))
        begin = time.perf_counter()
        table.flush()
        flush_seconds, peak = time.perf_counter() - begin, max(training.peak, resident_bytes())
        sample = torch.from_numpy(
            np.flatnonzero(training.updated)[:: max(1, int(training.updated.sum()) // 5_000)]
        )
        trained, counters, record_bytes, cache_rows = (
            table.read(sample),
            dict(table.counters),
            table.record_bytes,
            table.cache_rows,
        )
        table.close()
        del table
        reopened = DiskTable("item", num_rows, DIM, RowwiseAdam(), directory, cache_bytes=budget)
        found = reopened.read(sample)
        reopened.close()
    lost = int((found.weights_UD != trained.weights_UD).any(1).sum()) + int(
        (found.state["steps"] != trained.state["steps"]).sum()
    )
    served = counters["hits"] + counters["reads"] + counters["initialized"]
    claims = {
        "table_bytes": float(num_rows * record_bytes),
        "budget_bytes": float(budget),
        "resident_bytes": float(peak - start),
        "rows_lost": float(lost),
    }
    row = {
        "variant": f"{num_rows:,} x {DIM}, Adam",
        "table GB": num_rows * record_bytes / 1e9,
        "budget GB": budget / 1e9,
        "resident GB": (peak - start) / 1e9,
        "cache rows": cache_rows,
        "rows updated": int(training.updated.sum()),
        "steps": len(training.seconds),
        "ms a step": 1e3 * harness.median(training.seconds),
        "spread": harness.spread(training.seconds),
        "found in memory": counters["hits"] / served,
        "written back": counters["written"],
        "flush s": flush_seconds,
        "samples": training.seconds,
    }
    return harness.finish("disk-table", [row], claims, json_path)


if __name__ == "__main__":
    run_measurement(run, __doc__)
