"""What a run shows while it runs: a progress line, metrics as JSON lines, TensorBoard events.

Speeds divide by wall-clock time, all included (evaluation, checkpoints), so the line never
flatters. MFU is the model's FLOPs divided by (time x the matrix-multiply peak measured here, with
the same threads, at the start). Only rank 0 prints. Touch this to show or log something more.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from slipstream.files import atomic_file
from slipstream.progress import NotebookLine

_PLAIN_SECONDS = 10.0  # between lines where there is no terminal


def is_first_rank() -> bool:
    """Whether this process is the one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def measure_peak_flops(repeats: int = 3) -> float:
    """fp32 FLOP/s of torch.mm at 1024³ with the current threads: the best of a few tries."""
    a = torch.ones(1024, 1024)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def resident_bytes() -> int:
    """Return the memory this process occupies now; its peak where only that is known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class MetricsFile:
    """metrics.jsonl: one object a line, appended.

    A resumed run first drops the lines after its checkpoint.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
        with atomic_file(path) as temporary:
            temporary.write_text(
                "".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8"
            )
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a torn last line (a run killed while writing) ends them."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        records.append(record)
    return records


class TensorBoard:
    """Scalars for TensorBoard; does nothing when switched off."""

    def __init__(self, directory: Path, resume_step: int, enabled: bool) -> None:
        self._writer: Any = None
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(directory), purge_step=resume_step + 1 if resume_step else None
            )

    def scalars(self, group: str, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if self._writer is not None and isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Meter:
    """Tokens and FLOPs against the wall clock since the last reading."""

    def __init__(self, peak_flops: float | None) -> None:
        self.peak_flops, self._tokens, self._flops, self._since = (
            peak_flops,
            0,
            0.0,
            time.perf_counter(),
        )

    def add(self, tokens: int, flops: float) -> None:
        self._tokens += tokens
        self._flops += flops

    def read(self) -> dict[str, float]:
        """Speed since the last reading, and memory now; starts the next interval."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        reading = {
            "tokens_per_second": self._tokens / seconds,
            "memory_bytes": float(resident_bytes()),
        }
        if self.peak_flops:
            reading["mfu"] = self._flops / (seconds * self.peak_flops)
        self._tokens, self._flops, self._since = 0, 0.0, now
        return reading


def describe(record: dict[str, Any], seconds_left: float | None) -> str:
    """Return the figures of the progress line in words, without those not known yet."""
    parts = [f"loss {record['loss']:.4g}"]
    if speed := record.get("tokens_per_second"):
        parts.append(
            f"{speed / 1000:.0f}k tokens/s" if speed >= 10_000 else f"{speed:.0f} tokens/s"
        )
    if "mfu" in record:
        parts.append(f"MFU {100 * record['mfu']:.0f} %")
    if "exposed_lookup" in record:
        parts.append(f"exposed {100 * (record['exposed_lookup'] + record['exposed_comm']):.1f} %")
    if "memory_bytes" in record:
        parts.append(f"{record['memory_bytes'] / 1e9:.1f} GB")
    if "lr" in record:
        parts.append(f"lr {record['lr']:.2g}")
    if "HR@10" in record:
        parts.append("HR@10 " + f"{record['HR@10']:.3f}".removeprefix("0"))
    if seconds_left is not None:
        minutes, seconds = divmod(int(seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(
            f"{hours}:{minutes:02d}:{seconds:02d} left"
            if hours
            else f"{minutes}:{seconds:02d} left"
        )
    return "  ".join(parts)


class ProgressLine:
    """A live line on a terminal or in a notebook, plain lines elsewhere, silence on other ranks."""

    def __init__(self, epochs: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.epochs, self.quiet = epochs, quiet or not is_first_rank()
        self.console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._notebook = NotebookLine() if self.console.is_jupyter and not self.quiet else None
        self._last_plain = 0.0
        if not self.quiet and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:.0f} %  {task.fields[figures]}"),
            )
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("", total=1, figures="")
            self._progress.start()

    def show(self, epoch: int, done: int, total: int, figures: str, *, now: bool = False) -> None:
        """`done` of `total` steps of epoch `epoch` (counted from 1)."""
        if self.quiet:
            return
        title = f"epoch {min(epoch, self.epochs)}/{self.epochs}"
        text = f"{title} {100 * done // max(total, 1)} %  {figures}"
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, description=title, completed=done, total=max(total, 1), figures=figures
            )
        elif self._notebook is not None:
            self._notebook.show(text, now=now)
        elif now or time.monotonic() - self._last_plain >= _PLAIN_SECONDS:
            self._last_plain = time.monotonic()
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._notebook is not None:
            self._notebook.close()
