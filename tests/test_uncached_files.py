"""Files written past the page cache hold what was written, on every file system."""

import errno
import os

import pytest

from slipstream import uncached_files
from slipstream.uncached_files import BLOCK, UncachedFile


def parts(*sizes):
    return [os.urandom(size) for size in sizes]


@pytest.mark.parametrize("sizes", [(), (5,), (BLOCK,), (3, BLOCK + 7, 2 * BLOCK, 1)])
def test_a_file_holds_the_bytes_in_order(tmp_path, sizes):
    written = parts(*sizes)
    with UncachedFile(tmp_path / "file") as file:
        for part in written:
            file.write(memoryview(part))
    assert (tmp_path / "file").read_bytes() == b"".join(written)


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_a_file_system_that_refuses_gets_the_usual_writes(tmp_path, monkeypatch, refuses):
    usual = getattr(os, refuses)
    refused = []

    def once(*given):
        if not refused and (refuses == "write" or given[1] & os.O_DIRECT):
            refused.append(given)
            raise OSError(errno.EINVAL, "Invalid argument")
        return usual(*given)

    monkeypatch.setattr(uncached_files.os, refuses, once)
    (part,) = parts(BLOCK + 9)
    with UncachedFile(tmp_path / "file") as file:
        file.write(memoryview(part))
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == part and len(refused) == 1


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(uncached_files.os, "write", refuse)
    with pytest.raises(OSError, match="No space left"), UncachedFile(tmp_path / "file") as file:
        file.write(memoryview(b"x" * (BLOCK + 1)))


def test_an_error_inside_is_not_hidden(tmp_path):
    with pytest.raises(KeyError), UncachedFile(tmp_path / "file") as file:
        file.write(memoryview(b"x"))
        raise KeyError
