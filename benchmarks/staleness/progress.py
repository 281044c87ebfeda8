"""What a study shows while it runs: finished runs, how many are left, and for how long."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from benchmarks.staleness.plan import Planned


class Watcher:
    """Looks for new results: a live bar on a terminal, a line per run elsewhere."""

    def __init__(
        self, runs: Sequence[Planned], out: Path, jobs: int, console: Console | None = None
    ) -> None:
        self.runs, self.out, self.jobs = list(runs), out, jobs
        self.console = console or Console(stderr=True, highlight=False)
        self.done: dict[str, dict[str, Any]] = {}
        self._looked = 0.0
        self._bar: Progress | None = None
        for run in self.runs:
            if (found := run.result(out)) is not None:
                self.done[run.name] = found

    def __enter__(self) -> "Watcher":
        if self.done:
            self.console.print(f"{len(self.done)} of {len(self.runs)} runs were done before")
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed}/{task.total}"),
            )
            self._bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=self.console)
            self._task = self._bar.add_task(
                "runs", total=len(self.runs), completed=len(self.done), left=""
            )
            self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self) -> None:
        """Look for new results, at most once a second."""
        if time.monotonic() - self._looked < 1.0 and len(self.done) < len(self.runs):
            return
        self._looked = time.monotonic()
        for run in self.runs:
            if (
                run.name not in self.done
                and run.result_path(self.out).exists()
                and (found := run.result(self.out)) is not None
            ):
                self.done[run.name] = found
                self._show(run, found)

    def seconds_left(self) -> float | None:
        """Estimate from the mean time of finished runs, of the same case where there are any."""
        known = list(self.done.values())
        if not known:
            return None
        overall = sum(each["seconds"] for each in known) / len(known)
        total = 0.0
        for run in self.runs:
            if run.name not in self.done:
                alike = [each["seconds"] for each in known if each["case"] == run.case.name]
                side_by_side = self.jobs if run.variant.ranks == 1 else 1
                total += (sum(alike) / len(alike) if alike else overall) / side_by_side
        return total

    def _show(self, run: Planned, found: dict[str, Any]) -> None:
        left = self.seconds_left() or 0.0
        left_text = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"
        figures = found.get("figures", {})
        words = ", ".join(
            f"{name} {figures[name]:.4f}" for name in run.case.figures if name in figures
        ) or found.get("failed", "")
        line = (
            f"{len(self.done)}/{len(self.runs)} {run.name}: {words} ({found['seconds']:.0f} "
            f"s); {left_text}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=len(self.done), left=left_text)
            self._bar.console.print(line)
        else:
            self.console.print(line, soft_wrap=True)
