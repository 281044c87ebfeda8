"""What /proc tells about processes: children, resident memory.

Touch this when a benchmark or a system test reads another figure of a running process.
"""

import contextlib
import threading
from pathlib import Path


def children(pid: int) -> dict[str, list[int]]:
    """Return the child processes of a server by the last word of their module."""
    found: dict[str, list[int]] = {}
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{word}/cmdline").read_bytes().decode().split("\0")
        if len(command) > 2:
            found.setdefault(command[2].rpartition(".")[2], []).append(int(word))
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


class MemoryWatch:
    """Samples the resident memory of a process in a thread while the block runs."""

    def __init__(self, pid: int, samples: list[int], pause: float) -> None:
        self._pid, self._samples, self._pause = pid, samples, pause
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._pause):
            self._samples.append(resident_bytes(self._pid))
