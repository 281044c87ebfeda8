"""What every benchmark shares: variants in turns, medians with their spread, one table, one JSON.

Variants take turns in one run, so a slow second of the machine hits all of them and ratios stay
comparable. Touch this when the JSON of all benchmarks changes.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slipstream.files import atomic_file
from slipstream.ops import native
from slipstream.ops.allocator import keep_freed_memory

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, instruction set, versions."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in information.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": native.status(),
    }


def command_line() -> str:
    """Return the command of this process as a reader types it, without the places of results."""
    program, *words = sys.argv
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.name.startswith("benchmarks"):
        program = f"python -m {module.name.removesuffix('.__main__')}"
    elif module is not None and module.name.startswith("slipstream"):
        program = "slipstream"
    else:
        program = Path(program).name
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] in ("--json", "--recorded"):
            kept.pop()
        else:
            kept.append(word)
    return " ".join([program, *(word for word in kept if word not in ("--json", "--recorded"))])


def commit() -> str | None:
    """Return the commit of the tree that is measured, with `+` where it has changes."""
    ask = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None


def joined_commits(made_at: Iterable[str | None]) -> str | None:
    """Return the commits at which a result was made, this tree's last, as one text."""
    return ", ".join(each for each in dict.fromkeys([*made_at, commit()]) if each) or None


def set_training_allocator() -> str:
    """Set the allocator of this process as training sets it; every variant then runs under it.

    Returns what becomes of freed memory, for the result.
    """
    return "kept" if keep_freed_memory() else "as the system has it"


def short_machine() -> dict[str, Any]:
    """Describe the machine in three words: platform, processor, cores."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
    }


def interleave(
    variants: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Time every variant in turns; the first `warm_up` rounds do not count.

    Returns the seconds of every repeat by variant.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(-warm_up, repeats):
        for name, function in variants.items():
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if repeat >= 0:
                samples[name].append(elapsed)
    return samples


def note(text: str) -> None:
    """Print on standard error what is being measured; some runs take minutes."""
    Console(stderr=True, highlight=False).print(f"{text} …", style="dim")


def median(samples: Sequence[float]) -> float:
    """Return the middle sample."""
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float:
    """Return half the distance between the quartiles as a share of the median."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / median(samples)


def matmul_peak() -> tuple[Callable[[], object], float]:
    """Return a call of torch.mm fp32 1024^3, against which mfu is measured, and its FLOPs."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    out = torch.empty(1024, 1024)
    return lambda: torch.mm(a, b, out=out), 2.0 * 1024**3


def describe(bench: str) -> dict[str, Any]:
    """Return what every result says of its origin: command, commit, time, machine, threads."""
    return {
        "bench": bench,
        "command": command_line(),
        "commit": commit(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
    }


def finish(
    bench: str,
    rows: list[Row],
    claims: dict[str, float],
    json_path: Path | None,
    *,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Print rows and claims as tables, write the JSON if a path is given, and return it.

    `about` is what a result that was made in several runs says of itself.
    """
    result: dict[str, Any] = {**describe(bench), **(about or {}), "rows": rows, "claims": claims}
    console = Console()
    described = f"{machine()['processor']}, {torch.get_num_threads()} threads, {native.status()}"
    print_rows(console, rows, f"bench {bench}", described)
    for name, value in claims.items():
        console.print(f"{name} = {value:.4g}", highlight=False)
    if json_path is not None:
        with atomic_file(json_path) as path:
            Path(path).write_text(json.dumps(result, indent=1) + "\n")
    return result


def print_rows(console: Console, rows: list[Row], title: str, caption: str) -> None:
    """Print rows as a table; columns that do not fit beside each other follow in further tables.

    A table leaves out the rows that have nothing in its columns.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.endswith("samples")))
    width = {column: _width(console, _table(rows, [column])) for column in columns}
    lead, rest = columns[:1], columns[1:]
    while True:
        count, taken = 0, sum(width[column] for column in lead)
        for column in rest:
            taken += width[column]
            if count and taken >= console.width:  # one more is the border on the right
                break
            count += 1
        chosen, rest = rest[:count], rest[count:]
        kept = [row for row in rows if any(column in row for column in chosen)] or rows
        table = _table(kept, lead + chosen)
        table.title, table.caption = title, None if rest else caption
        console.print(table)
        if not rest:
            return


def _table(rows: list[Row], columns: list[str]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(column, "")) for column in columns))
    return table


def _width(console: Console, table: Table) -> int:
    """Return what the only column of a table takes, one of its borders included."""
    options = console.options.update(width=10_000)
    return console.measure(table, options=options).maximum - 1


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
