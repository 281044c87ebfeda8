"""Runs a serving process whose wall clock is the machine's plus an offset from a file.

    python benchmarks/chaos/jumping_clock.py MODULE FILE -

The offset is one number in a file that all processes of a deployment map, so that all clocks jump
at once. Time that never goes back (`time.monotonic`) is left alone, as it is by a machine whose
clock is set. Touch this when a process reads the time in another way.
"""

import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

OFFSET = struct.Struct("<d")


def set_offset(path: Path, seconds: float) -> None:
    """Let the clocks that read this file jump."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, OFFSET.pack(seconds), 0)
    finally:
        os.close(file)


def shifted_clock(path: Path) -> Callable[[], float]:
    """Return a `time.time` that adds the offset of the file."""
    with path.open("rb") as file:
        offset, machine_time = mmap.mmap(file.fileno(), OFFSET.size, prot=mmap.PROT_READ), time.time

    def read() -> float:
        return machine_time() + float(OFFSET.unpack_from(offset)[0])

    return read


def command(module: str, path: Path) -> tuple[str, ...]:
    """Return the command of a serving process with such a clock."""
    return (sys.executable, str(Path(__file__).resolve()), module, str(path))


def main() -> None:
    """Replace the wall clock, then be the module."""
    _, module, path, *arguments = sys.argv
    sys.path.pop(0)  # the folder of this file
    read = shifted_clock(Path(path))
    time.time = read
    time.time_ns = lambda: int(read() * 1e9)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
