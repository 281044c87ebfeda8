"""An index from any non-negative int64 key to an int64 value. Touch this to change that mapping.

`make_index` returns the native index (open addressing) where kernels were built, and otherwise one
over a dictionary. Both behave alike; tests compare the native index with the dictionary.
"""

from typing import Protocol

import torch

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel

_SMALLEST = 64


class Index(Protocol):
    """Maps keys to values."""

    def __len__(self) -> int: ...

    def find(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Return the value of each key, -1 where it is absent."""
        ...

    def insert(self, keys_U: torch.Tensor, values_U: torch.Tensor) -> None:
        """Set the values of keys, present or not."""
        ...

    def erase(self, keys_U: torch.Tensor) -> None:
        """Remove keys; absent ones are ignored."""
        ...

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys, ascending, and their values."""
        ...


class NativeIndex:
    """Linear probing in one int64 tensor of (key, value) pairs, at most half full."""

    def __init__(self, room: int = 0) -> None:
        self._length = 0
        self._pairs = self._empty(
            max(_SMALLEST, 1 << (2 * room - 1).bit_length()) if room else _SMALLEST
        )

    @staticmethod
    def _empty(size: int) -> torch.Tensor:
        return torch.full((size, 2), -1, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    @property
    def _mask(self) -> int:
        return len(self._pairs) - 1

    def find(self, keys_U: torch.Tensor) -> torch.Tensor:
        keys_U = keys_U.contiguous()
        values_U = torch.empty_like(keys_U)
        kernel("ss_hash_find")(self._pairs, self._mask, keys_U, keys_U.numel(), values_U)
        return values_U

    def insert(self, keys_U: torch.Tensor, values_U: torch.Tensor) -> None:
        keys_U, values_U = keys_U.contiguous(), values_U.contiguous()
        _refuse_negative(keys_U)
        self._make_room(self._length + keys_U.numel())
        call = kernel("ss_hash_insert")
        self._length += call(self._pairs, self._mask, keys_U, values_U, keys_U.numel())

    def erase(self, keys_U: torch.Tensor) -> None:
        keys_U = keys_U.contiguous()
        self._length -= kernel("ss_hash_erase")(self._pairs, self._mask, keys_U, keys_U.numel())

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        used = self._pairs[self._pairs[:, 0] >= 0]
        used = used[used[:, 0].argsort()]
        return used[:, 0].contiguous(), used[:, 1].contiguous()

    def _make_room(self, length: int) -> None:
        size = len(self._pairs)
        while size < 2 * length:
            size *= 2
        if size > len(self._pairs):
            larger = self._empty(size)
            kernel("ss_hash_refill")(self._pairs, len(self._pairs), larger, size - 1)
            self._pairs = larger


class PlainIndex:
    """The same mapping in a dictionary, where no kernels were built."""

    def __init__(self, room: int = 0) -> None:
        self._values: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def find(self, keys_U: torch.Tensor) -> torch.Tensor:
        return torch.tensor(
            [self._values.get(key, -1) for key in keys_U.tolist()], dtype=torch.int64
        )

    def insert(self, keys_U: torch.Tensor, values_U: torch.Tensor) -> None:
        _refuse_negative(keys_U)
        self._values.update(zip(keys_U.tolist(), values_U.tolist(), strict=True))

    def erase(self, keys_U: torch.Tensor) -> None:
        for key in keys_U.tolist():
            self._values.pop(key, None)

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = torch.tensor(sorted(self._values.items()), dtype=torch.int64).view(-1, 2)
        return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def make_index(room: int = 0) -> Index:
    """Make an empty index with room for so many keys before it must grow."""
    return NativeIndex(room) if native.available() else PlainIndex(room)


def _refuse_negative(keys_U: torch.Tensor) -> None:
    if keys_U.numel() and int(keys_U.min()) < 0:
        raise ValueError(f"keys of an index are not negative, got {int(keys_U.min())}")
