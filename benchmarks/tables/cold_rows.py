"""A file of rows that is not in the system's cache, read by threads or through a memory map.

Touch this when the record files of the disk table change.
"""

import mmap
import os
from pathlib import Path

import numpy as np
import torch

from slipstream.tables.disk_files import BLOCK, RecordFiles
from slipstream.tables.disk_records import RecordFormat
from slipstream.tables.embedding_table import Rows, first_rows
from slipstream.tables.row_optimizers import RowwiseAdagrad

_CHUNK = 1 << 16
_NAME = "numbered-00000.rows"


class ColdRows:
    """Rows 0 … num_rows - 1 in the record files of the disk table."""

    def __init__(self, directory: Path, num_rows: int, dim: int) -> None:
        self._format, self._dim = RecordFormat(RowwiseAdagrad(), dim, torch.float32), dim
        self._files = RecordFiles(
            directory, {"name": "cold"}, self._format.bytes, [0], [_NAME], num_rows
        )
        self._path = directory / _NAME
        for start in range(0, num_rows, _CHUNK):
            keys = torch.arange(start, min(start + _CHUNK, num_rows))
            self._files.write(keys.numpy(), self._format.pack(self._expected(keys)), 4)
        self._files.commit(None)
        self._map: mmap.mmap | None = None

    def _expected(self, keys: torch.Tensor) -> Rows:
        return Rows(
            first_rows(0, "cold", keys, self._dim, 0.035, torch.float32), {"sum": keys.float()}
        )

    def drop_caches(self) -> None:
        """Make the system drop the file's pages, and map the file again."""
        if self._map is not None:
            self._map.close()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            self._map.madvise(mmap.MADV_RANDOM)
        finally:
            os.close(descriptor)

    def read(self, keys: torch.Tensor, team: int) -> Rows:
        """Read as the disk table does: in the order of the file, with some threads."""
        order = keys.argsort()
        return self._format.unpack(self._files.read(keys[order].numpy(), team))

    def read_mapped(self, keys: torch.Tensor) -> Rows:
        """Copy the same records out of the memory map."""
        assert self._map is not None
        numbers = keys.sort().values.numpy()
        size, per_block = self._format.bytes, BLOCK // self._format.bytes
        starts = 2 * BLOCK * (numbers // per_block) + size * (numbers % per_block)
        view = np.frombuffer(self._map, dtype=np.uint8)
        records = np.empty((len(numbers), size), dtype=np.uint8)
        for row, start in zip(records, starts.tolist(), strict=True):
            row[:] = view[start : start + size]
        del view
        return self._format.unpack(torch.from_numpy(records))

    def check(self, keys: torch.Tensor) -> None:
        """Check that both ways of reading give the rows that were written."""
        expected = self._expected(keys.sort().values)
        for rows in (self.read(keys, 16), self.read_mapped(keys)):
            if not torch.equal(rows.weights_UD, expected.weights_UD) or not torch.equal(
                rows.state["sum"], expected.state["sum"]
            ):
                raise AssertionError("cold rows were read wrongly")

    def close(self) -> None:
        """Close the files."""
        if self._map is not None:
            self._map.close()
        self._files.close()
