"""What every benchmark shares: variants interleaved in one run, warm-up excluded, medians with
their spread, one table, one JSON.

Interleaving means that a slow second of the machine hits all variants alike, so ratios survive
where absolute times do not.
"""

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slipstream.files import atomic_file
from slipstream.ops import native

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """The machine in words: processor, cores, instruction set, versions."""
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


def interleave(
    variants: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of every repeat of every variant, taken in turns after `warm_up` rounds that do not
    count.
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
    """Says on standard error what is being done now: some of these runs take minutes."""
    Console(stderr=True, highlight=False).print(f"{text} …", style="dim")


def median(samples: Sequence[float]) -> float:
    """The middle sample."""
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median: how far to trust it."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / median(samples)


def matmul_peak() -> tuple[Callable[[], object], float]:
    """The yardstick of every mfu: a call of torch.mm fp32 1024^3, and its floating-point
    operations.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    out = torch.empty(1024, 1024)
    return lambda: torch.mm(a, b, out=out), 2.0 * 1024**3


def finish(
    bench: str, rows: list[Row], claims: dict[str, float], json_path: Path | None
) -> dict[str, Any]:
    """Prints the rows and claims as tables, writes the JSON where asked, and returns it."""
    result: dict[str, Any] = {
        "bench": bench,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "rows": rows,
        "claims": claims,
    }
    console = Console()
    described = f"{machine()['processor']}, {torch.get_num_threads()} threads, {native.status()}"
    table = Table(title=f"bench {bench}", caption=described)
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "samples"))
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(column, "")) for column in columns))
    console.print(table)
    for name, value in claims.items():
        console.print(f"{name} = {value:.4g}", highlight=False)
    if json_path is not None:
        with atomic_file(json_path) as path:
            Path(path).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
