"""Freed memory is kept where the C allocator has the setting."""

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
