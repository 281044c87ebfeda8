"""Lazy zeros are zeros, and may be larger than memory."""

import torch

from slipstream.tables.memory_pages import lazy_zeros


def test_lazy_zeros_are_zeros():
    for shape in ((3, 4), (1 << 15, 64)):
        zeros = lazy_zeros(*shape, dtype=torch.float32)
        assert zeros.shape == shape and zeros.is_contiguous() and not zeros.any()
        zeros[-1, -1] = 1
        assert zeros.sum() == 1
