"""Files written past the system's page cache, where the system can.

A checkpoint of gigabytes is not read again soon. Through the cache it costs a copy and the handling
of every page, and it drives out pages that are in use. Touch this to support another system.
"""

import contextlib
import errno
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

_DIRECT = getattr(os, "O_DIRECT", 0)
BLOCK = 1 << 23  # bytes written at a time: a multiple of what any device asks for


class UncachedFile:
    """A new file, written from its beginning to its end, and flushed when the block ends.

    Whole blocks go straight to the device; the rest at the end, and everything on a file system
    that refuses, takes the usual way.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        try:
            self._file, self._direct = os.open(path, flags | _DIRECT, 0o644), bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file, self._direct = os.open(path, flags, 0o644), False
        self._block = mmap.mmap(-1, BLOCK)  # begins at a page, as the device asks
        self._bytes = np.frombuffer(self._block, dtype=np.uint8)
        self._used = 0

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        source = np.frombuffer(data, dtype=np.uint8)
        while len(source):
            count = min(len(source), BLOCK - self._used)
            np.copyto(self._bytes[self._used : self._used + count], source[:count])
            self._used += count
            source = source[count:]
            if self._used == BLOCK:
                self._write_out()

    def _write_out(self) -> None:
        view, self._used = memoryview(self._block)[: self._used], 0
        if len(view) < BLOCK:
            self._let_cache()
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._let_cache()

    def _let_cache(self) -> None:
        if self._direct:
            import fcntl

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
            self._direct = False

    def __enter__(self) -> "UncachedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._write_out()
                os.fsync(self._file)
        finally:
            os.close(self._file)
            del self._bytes
            with contextlib.suppress(BufferError):
                self._block.close()
