"""Progress of long work, on a terminal or in a notebook. Touch this to show it in another way.

A notebook gets one line of text that is written over, so nothing has to be installed for it.
"""

import sys
import threading
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

_NOTEBOOK_SECONDS = 0.2  # between two updates of a notebook's line


class NotebookLine:
    """A line of a notebook's output that each text replaces."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._width, self._last = stream or sys.stderr, 0, 0.0

    def show(self, text: str, *, now: bool = False) -> None:
        """Replace the line, at most a few times a second unless it must be `now`."""
        if now or time.monotonic() - self._last >= _NOTEBOOK_SECONDS:
            self._last = time.monotonic()
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = max(self._width, len(text))

    def close(self) -> None:
        """Leave an empty line."""
        if self._width:
            self.show("", now=True)
            self._stream.write("\r")


class Ticker:
    """A progress line on stderr for work that takes longer than two seconds.

    It is called with (what, done, total); a total of 0 means unknown.
    """

    def __init__(self, patience: float = 2.0) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("starting", total=None)
        self._notebook = NotebookLine() if self._progress.console.is_jupyter else None
        self._timer = threading.Timer(patience, self._show)
        self._timer.daemon = True
        self._shown = False

    def _show(self) -> None:
        if self._notebook is not None:
            self._shown = True
        elif self._progress.console.is_terminal:
            self._shown = True
            self._progress.start()

    def __enter__(self) -> "Ticker":
        self._timer.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._notebook is not None:
            self._notebook.close()
        elif self._shown:
            self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total or None)
        if self._notebook is not None and self._shown:
            share = f"  {100 * done // total} %" if total else ""
            self._notebook.show(f"{what}{share}")
