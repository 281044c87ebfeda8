"""Virtual slices: every key belongs to one of 65,536 slices, and a rank owns a contiguous range of them."""

import torch

from slipstream.ops.counter_random import mix64

NUM_SLICES = 1 << 16


def slice_of(keys_U: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 65536): the slice of each key, by a fixed mix of its 64 bits."""
    return (mix64(keys_U) >> 48) & (NUM_SLICES - 1)


class Placement:
    """Which rank of `world` owns which slices: contiguous ranges, as even as they go."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.bounds = [NUM_SLICES * rank // world for rank in range(world + 1)]

    def owner_of(self, keys_U: torch.Tensor) -> torch.Tensor:
        """The rank that owns each key."""
        if self.world == 1:
            return torch.zeros_like(keys_U)
        return torch.bucketize(slice_of(keys_U), torch.tensor(self.bounds[1:-1]), right=True)
