"""Freed memory is kept where the C allocator has the setting."""

import platform

import pytest

from slipstream.ops import allocator, native
from tests.support.processes import run_python


@pytest.mark.system
def test_the_setting_is_accepted_where_glibc_is():
    code = (
        "import platform\n"
        "from slipstream.ops import native\n"
        "from slipstream.ops.allocator import keep_freed_memory\n"
        "glibc = platform.libc_ver()[0] == 'glibc' and native.available()\n"
        "print(keep_freed_memory() is glibc)\n"
    )
    assert run_python(code) == "True"


def test_without_kernels_nothing_is_set(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    assert allocator.keep_freed_memory() is False


# A pass allocates several large pieces and frees them; in time it finds their pages mapped.
FAULTS = """
import resource, threading
import torch
from slipstream.ops.allocator import keep_freed_pieces

def work():
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        pieces = [torch.ones(300_000) for _ in range(10)]
        del pieces
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    print(faults)

if {kept}:
    keep_freed_pieces()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.system
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_pages_of_freed_pieces_are_not_mapped_again():
    kept, returned = (int(run_python(FAULTS.replace("{kept}", str(k)))) for k in (True, False))
    assert kept < 100 < 1_000 < returned
