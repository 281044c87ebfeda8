"""How fast and in how little memory a raw Parquet log becomes a sequence store.

Each repeat is a process of its own, so its peak resident memory (ru_maxrss, mapped pages included)
is its own too. Writing the log does not count. The plain way takes turns with it: the whole log in
memory, one Polars sort, one group-by. Touch this when ingest gets another path worth measuring.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from slipstream.data.preparation import Choices, prepare
from slipstream.data.raw_log import Columns
from slipstream.files import write_json

ROWS, QUICK_ROWS = 20_000_000, 1_000_000
REPEATS, QUICK_REPEATS = 5, 2
CHILD_SECONDS = 900
ACTIONS = ("click", "like")


def write_log(path: Path, rows: int, seed: int = 0) -> None:
    """Write a log as a service does.

    Users are interleaved, times ascend except for late rows, ids are sparse 63-bit numbers, items
    follow Zipf's law.
    """
    users, items = max(10, rows // 100), max(10, rows // 40)
    generator = np.random.default_rng(seed)
    weights_U = generator.lognormal(0.0, 1.0, users).cumsum()
    spread = 0x5DEECE66D1CE4E5
    path.mkdir()
    for part, begin in enumerate(range(0, rows, 1_000_000)):
        count = min(1_000_000, rows - begin)
        user_T = np.searchsorted(weights_U, generator.random(count) * weights_U[-1])
        item_T = (items ** generator.random(count)).astype(np.int64)
        straggling_T = (generator.random(count) < 0.05) * generator.integers(0, 3_600, count)
        frame = pl.DataFrame(
            {
                "user_id": (user_T + 1) * spread & (2**63 - 1),
                "item_id": (item_T + 1) * spread & (2**63 - 1),
                "timestamp": 1_600_000_000 + (begin + np.arange(count)) // 10 - straggling_T,
                "click": generator.random(count) < 0.4,
                "like": generator.random(count) < 0.05,
            }
        )
        frame.write_parquet(path / f"log_{part:05d}.parquet")


def ingest_slipstream(log: Path, out: Path) -> int:
    """Prepare the log as `slipstream data prepare` does; returns its behaviours.

    Exact duplicates are kept, as the plain way keeps them.
    """
    columns = Columns("user_id", "item_id", "timestamp", ACTIONS)
    return prepare(log, out, Choices(columns=columns, duplicates="keep")).num_behaviours


def ingest_in_memory(log: Path, out: Path) -> int:
    """Prepare the log the plain way, everything in memory at once."""
    frame = pl.read_parquet(log).with_columns(pl.col(*ACTIONS).cast(pl.Float32))
    for name in ("user_id", "item_id"):
        rows = frame.select(pl.col(name).unique().sort()).with_row_index(f"{name} row")
        frame = frame.join(rows, on=name, how="left", maintain_order="left").drop(name)
    frame = frame.sort("user_id row", "timestamp", maintain_order=True)
    out.mkdir(parents=True)
    lists = frame.group_by("user_id row", maintain_order=True).agg(pl.all())
    lists.write_ipc(out / "sequences.arrow", compression="uncompressed")
    return int(lists["timestamp"].list.len().sum())


VARIANTS = {"slipstream": ingest_slipstream, "polars in memory": ingest_in_memory}


def child(variant: str, log: Path, out: Path) -> None:
    """Run one repeat in this process; prints rows, seconds, CPU seconds and peak bytes as JSON."""
    import resource

    begin, cpu_begin = time.perf_counter(), time.process_time()
    rows = VARIANTS[variant](log, out)
    seconds = time.perf_counter() - begin
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(
        json.dumps(
            {
                "rows": rows,
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu_begin,
                "peak_bytes": peak,
            }
        )
    )


def _repeat(variant: str, log: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "slipstream.bench.ingest_rate", variant, str(log), str(out)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=CHILD_SECONDS
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table, write the JSON if a path is given."""
    from slipstream.bench.harness import note  # here, because a measured child must not load torch

    rows, repeats = (QUICK_ROWS, QUICK_REPEATS) if quick else (ROWS, REPEATS)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as scratch:
        log = Path(scratch) / "log"
        note(f"writing a log of {rows:,} rows")
        write_log(log, rows)
        for repeat in range(repeats + 1):
            note(f"measuring round {repeat} of {repeats}" if repeat else "warming up")
            for name in VARIANTS:
                out = Path(scratch) / "out"
                sample = _repeat(name, log, out)
                if repeat:  # the first round warms the page cache
                    samples[name].append(sample)
                shutil.rmtree(out)
    result = _result(rows, samples)
    _print(result)
    if json_path is not None:
        write_json(json_path, result)
    return result


def _result(rows: int, samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    from slipstream.bench.harness import describe

    table = []
    for name, several in samples.items():
        rates = [sample["rows"] / sample["seconds"] for sample in several]
        peak = max(sample["peak_bytes"] for sample in several)
        cpu = median(sample["cpu_seconds"] for sample in several)
        spread = (max(rates) - min(rates)) / median(rates)
        table.append(
            {
                "variant": name,
                "rows_per_second": median(rates),
                "spread": spread,
                "cpu_seconds": cpu,
                "peak_bytes": peak,
                "samples": several,
            }
        )
    ours = table[0]
    return describe("ingest") | {
        "threads": pl.thread_pool_size(),
        "log_rows": rows,
        "rows": table,
        "claims": {"rows_per_second": ours["rows_per_second"], "peak_bytes": ours["peak_bytes"]},
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(
        title=f"ingest of a {result['log_rows']:,}-row Parquet log, {result['threads']} threads"
    )
    for heading in ("variant", "rows/s (median)", "spread", "CPU seconds", "peak memory"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in result["rows"]:
        figures = (
            f"{row['rows_per_second']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['cpu_seconds']:.1f}",
        )
        table.add_row(row["variant"], *figures, f"{row['peak_bytes'] / 2**30:.2f} GB")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
