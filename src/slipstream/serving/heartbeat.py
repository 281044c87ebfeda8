"""The heartbeat of a process: a moment in shared memory, by which a supervisor knows that it moves.

A process that hangs, that was stopped, or whose compute thread is stuck writes no new moment; its
supervisor kills it and starts another. The clock is the machine's monotonic one, which all its
processes share. Touch this when a process shows that it is alive in another way.
"""

import mmap
import os
import struct
import time
from pathlib import Path

_MOMENT = struct.Struct("<d")


class Heartbeat:
    """A file of one moment, written by a process and read by its supervisor.

    0: it has not begun. A negative moment: it ends since then, and is not watched.
    """

    def __init__(self, path: str | Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_size < _MOMENT.size:
                os.posix_fallocate(file, 0, _MOMENT.size)  # a full disk is an error here
            self._map = mmap.mmap(file, _MOMENT.size)
        finally:
            os.close(file)

    def beat(self) -> None:
        """Write that the process moves now."""
        self._write(time.monotonic())

    def end(self) -> None:
        """Write that the process ends from now on."""
        self._write(-time.monotonic())

    def reset(self) -> None:
        """Write that a new process has not begun to beat."""
        self._write(0.0)

    def read(self) -> float:
        """Return the last moment."""
        (moment,) = _MOMENT.unpack_from(self._map)
        return float(moment)

    @property
    def begun(self) -> bool:
        """Whether the process beats, or has begun to end."""
        return self.read() != 0.0

    def silent_since(self) -> float | None:
        """Return the last beat; None for a process that has not begun, or ends."""
        moment = self.read()
        return moment if moment > 0.0 else None

    def _write(self, moment: float) -> None:
        _MOMENT.pack_into(self._map, 0, moment)  # eight aligned bytes: never half written
