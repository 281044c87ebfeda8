"""Records are read and written at their offsets, natively and without kernels."""

import os

import numpy as np
import pytest
import torch

from slipstream.ops import native
from slipstream.tables import disk_transfer
from slipstream.tables.disk_transfer import EndOfFileError, transfer_records


@pytest.fixture(params=["native", "plain"])
def kernels(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(disk_transfer.native, "available", lambda: False)
    elif not native.available():
        pytest.skip("native kernels are not built")


@pytest.fixture
def files(tmp_path):
    opened = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b")]
    yield np.array(opened, dtype=np.int32)
    for descriptor in opened:
        os.close(descriptor)


def test_records_come_back_from_where_they_were_written(kernels, files):
    records = torch.arange(40, dtype=torch.uint8).view(5, 8)
    places = files[[0, 1, 0, 1, 0]], np.array([0, 8, 64, 0, 8])
    transfer_records(*places, records, 3, writes=True)
    found = torch.zeros_like(records)
    transfer_records(*places, found, 3, writes=False)
    assert torch.equal(found, records)
    assert os.pread(int(files[1]), 16, 0) == bytes(range(24, 32)) + bytes(range(8, 16))


def test_a_file_that_ends_too_early_and_a_closed_one_are_errors(kernels, files):
    record = torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(EndOfFileError):
        transfer_records(files[:1], np.array([4096]), record, 2, writes=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        transfer_records(np.array([9999]), np.array([0]), record, 2, writes=False)


def test_records_must_be_bytes_with_a_place_each(files):
    for records in (torch.zeros(1, 8), torch.zeros(2, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="one row per file and offset"):
            transfer_records(files[:1], np.array([0]), records, 2, writes=False)
    transfer_records(files[:0], np.array([]), torch.zeros(0, 8, dtype=torch.uint8), 2, writes=True)
