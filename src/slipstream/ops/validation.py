"""Checks shared by all operators: a wrong argument is one clear Python exception, never a crash inside a kernel.

TypeError for the wrong kind of thing (not a tensor, wrong dtype, mixed devices), ValueError for the wrong shape or content,
IndexError for an index out of range. Contents are only read where they live on a CPU, so that an accelerator is never stalled.
"""

from collections.abc import Mapping

import torch

MAX_SEQUENCE = 1 << 30
MAX_TIME = 1 << 62


def check_tensor(name: str, value: object, *, dims: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`value` as a tensor with `dims` axes (and, if given, of `dtype`)."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a plain strided tensor, got layout {value.layout}")
    if value.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(value.shape)}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
    return value


def check_alike(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """All given tensors are floating point of one dtype and live on one device."""
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    if not first.dtype.is_floating_point:
        raise TypeError(f"{first_name} must be floating point, got {first.dtype}")
    for name, tensor in present[1:]:
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}; give both the same dtype")
        check_device(name, tensor, first_name, first)


def check_device(name: str, tensor: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    """Both tensors live on one device."""
    if tensor.device != first.device:
        raise TypeError(f"{name} is on {tensor.device} but {first_name} is on {first.device}; move both to one device")


def check_offsets(name: str, offsets_B1: object, total: int) -> torch.Tensor:
    """int64 offsets that start at 0, never decrease and end at `total`."""
    offsets = check_tensor(name, offsets_B1, dims=1, dtype=torch.int64)
    if offsets.numel() == 0:
        raise ValueError(f"{name} must have one entry more than there are sequences, got none")
    if offsets.device.type == "cpu":
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != total:
            raise ValueError(f"{name} must run from 0 to {total} (the number of tokens), got {first} to {last}")
        lengths = offsets.diff()
        if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > MAX_SEQUENCE):
            raise ValueError(f"{name} must never decrease, and no sequence may exceed {MAX_SEQUENCE} tokens")
    return offsets


def check_indices(name: str, index: torch.Tensor, below: int) -> None:
    """int64 indices between 0 and below - 1."""
    if index.dtype != torch.int64:
        raise TypeError(f"{name} must be torch.int64, got {index.dtype}")
    if index.device.type == "cpu" and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= below:
            raise IndexError(f"{name} must lie between 0 and {below - 1}, got {low} to {high}")


def check_times(name: str, value: object, length: int) -> torch.Tensor:
    """int64 timestamps, one per token, small enough that no difference of two overflows."""
    times = check_tensor(name, value, dims=1, dtype=torch.int64)
    if times.numel() != length:
        raise ValueError(f"{name} must have one entry per token ({length}), got {times.numel()}")
    if length and times.device.type == "cpu":
        low, high = torch.aminmax(times)
        if int(low) <= -MAX_TIME or int(high) >= MAX_TIME:
            raise ValueError(f"{name} must stay within -2^62 and 2^62, got {int(low)} to {int(high)}")
    return times


def check_number(name: str, value: object, *, positive: bool = False) -> float:
    """A finite number; with `positive` above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} must be finite, got {value}")
    if positive and number <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return number
