"""Reads and writes records of open files: natively with several threads, or one after the other.

Touch this when the way records reach the disk changes (the native part is native/disk_rows.cpp).
"""

import errno
import os

import numpy as np
import torch

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel


class EndOfFileError(Exception):
    """A file ends before a record that should be in it."""


def transfer_records(
    files_U: np.ndarray, offsets_U: np.ndarray, records: torch.Tensor, threads: int, *, writes: bool
) -> None:
    """Read (or write) record i of `records` at `offsets_U[i]` of the open file `files_U[i]`.

    Raises OSError, or EndOfFileError where a file is too short.
    """
    if (
        records.dtype != torch.uint8
        or records.dim() != 2
        or not len(files_U) == len(offsets_U) == len(records)
    ):
        raise ValueError("records must be bytes, one row per file and offset")
    if not len(records):
        return
    if not native.available():
        _transfer_in_turn(files_U, offsets_U, records, writes)
        return
    files = torch.from_numpy(np.ascontiguousarray(files_U, dtype=np.int32))
    offsets = torch.from_numpy(np.ascontiguousarray(offsets_U, dtype=np.int64))
    call = kernel("ss_transfer_records")
    failure = call(files, offsets, len(records), records.shape[1], records, int(writes), threads)
    if failure < 0:
        raise EndOfFileError
    if failure:
        raise OSError(failure, os.strerror(failure))


def _transfer_in_turn(
    files_U: np.ndarray, offsets_U: np.ndarray, records: torch.Tensor, writes: bool
) -> None:
    rows = records.numpy()
    for file, offset, row in zip(files_U.tolist(), offsets_U.tolist(), rows, strict=True):
        done = os.pwritev(file, [row], offset) if writes else os.preadv(file, [row], offset)
        if done == 0 and not writes:
            raise EndOfFileError
        if done != len(row):
            raise OSError(errno.EIO, "a record was transferred only in part")
