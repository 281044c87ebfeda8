"""Pages of memory are there before they are written, and keep what they hold."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from slipstream.serving.cache.pages import populate, prefer_large_pages

SIZE = 8 << 20


@pytest.fixture
def memory() -> torch.Tensor:
    """Memory that no allocator has used before."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, SIZE, flags=flags), dtype=torch.uint8)


def resident_bytes(memory: torch.Tensor) -> int:
    """How much of the mapping that a tensor lies in is resident."""
    address = memory.data_ptr()
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            found = re.search(r"^Rss:\s+(\d+) kB", entry, re.M)
            assert found is not None
            return int(found[1]) * 1024
    raise AssertionError("the tensor lies in no mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="asking for pages is a call of Linux")
def test_pages_that_were_asked_for_are_resident(memory: torch.Tensor):
    prefer_large_pages(memory)
    before = resident_bytes(memory)
    populate(memory[: SIZE // 2])
    assert resident_bytes(memory) - before >= SIZE // 2


def test_asking_for_pages_keeps_what_they_hold(memory: torch.Tensor):
    memory[100:200] = 3
    prefer_large_pages(memory)
    populate(memory)
    assert int(memory.sum()) == 300
