"""A function of torch without its wrapper for torch.compile."""

import functools

from slipstream.ops.uncompiled import uncompiled


def test_the_innermost_function_is_found_and_a_plain_one_stays():
    def plain(x):
        return x + 1

    @functools.wraps(plain)
    def outer(x):
        raise AssertionError("the wrapper must not be called")

    assert uncompiled(outer) is plain and uncompiled(outer)(1) == 2
    assert uncompiled(plain) is plain
