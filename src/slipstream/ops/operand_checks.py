"""Checks shared by all operators: a wrong argument raises an exception before a kernel sees it.

TypeError for the wrong kind of thing (not a tensor, wrong dtype), ValueError for the wrong shape,
device or content, IndexError for an index out of range. Native code does not check its pointers, so
everything is checked here first, with a sentence that names the operand. The contents of offsets
and times are read only on a CPU, so that an accelerator need not wait. Touch this when an operator
needs another kind of check.
"""

import itertools
from collections.abc import Mapping

import torch

FEW = 16  # up to so many numbers, checking them one by one is faster than as tensors
MAX_SEQUENCE = 1 << 30
MAX_TIME = 1 << 62


def _plain(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a plain strided tensor, got layout {tensor.layout}")
    return tensor


def floating(name: str, tensor: torch.Tensor, *, dims: int) -> None:
    """`tensor` is a floating-point tensor of `dims` dimensions."""
    _plain(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), got shape {tuple(tensor.shape)}")


def like(
    name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor, shape: tuple[int, ...]
) -> None:
    """`tensor` has the given shape and the dtype and device of `other`."""
    _plain(name, tensor)
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{name} must have the dtype of {other_name} ({other.dtype}), got {tensor.dtype}"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name} ({other.device}), got {tensor.device}"
        )
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} to fit {other_name}, got {tuple(tensor.shape)}"
        )


def integers(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """`tensor` is int64 on `device` with the given shape, where None stands for any."""
    _plain(name, tensor)
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def index(
    name: str,
    tensor: torch.Tensor,
    size: int,
    *,
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """`tensor` is an int64 index into `size` rows."""
    integers(name, tensor, shape=shape, device=device)
    if tensor.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(tensor))
    if low < 0 or high >= size:
        raise IndexError(
            f"{name} must lie between 0 and {size - 1}, got {low if low < 0 else high}"
        )


def probability(name: str, value: float) -> None:
    """`value` is a probability of dropping, below one."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def positive(name: str, value: float) -> None:
    """`value` is a positive finite number."""
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def not_negative(name: str, value: float) -> None:
    """`value` is a finite number that is zero or more."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} must be zero or more and finite, got {value}")


def tensor(
    name: str, value: object, *, dims: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`value` as a tensor with `dims` axes (and, if given, of `dtype`)."""
    value = _plain(name, value)
    if value.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(value.shape)}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
    return value


def alike(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """All given tensors are floating point of one dtype and live on one device."""
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    if not first.dtype.is_floating_point:
        raise TypeError(f"{first_name} must be floating point, got {first.dtype}")
    for name, tensor in present[1:]:
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} but {first_name} is {first.dtype}; give both the same "
                "dtype"
            )
        same_device(name, tensor, first_name, first)


def same_device(name: str, tensor: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    """Both tensors live on one device."""
    if tensor.device != first.device:
        raise TypeError(
            f"{name} is on {tensor.device} but {first_name} is on {first.device}; move both to "
            "one device"
        )


def offsets(name: str, offsets_B1: object, total: int) -> torch.Tensor:
    """int64 offsets that start at 0, never decrease and end at `total`."""
    offsets = tensor(name, offsets_B1, dims=1, dtype=torch.int64)
    if offsets.numel() == 0:
        raise ValueError(f"{name} must have one entry more than there are sequences, got none")
    if offsets.device.type == "cpu":
        if len(offsets) <= FEW:
            numbers = offsets.tolist()
            steps = [after - before for before, after in itertools.pairwise(numbers)]
            if (
                numbers[0] == 0
                and numbers[-1] == total
                and all(0 <= step <= MAX_SEQUENCE for step in steps)
            ):
                return offsets
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != total:
            raise ValueError(
                f"{name} must run from 0 to {total} (the number of tokens), got {first} to {last}"
            )
        lengths = offsets.diff()
        if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > MAX_SEQUENCE):
            raise ValueError(
                f"{name} must never decrease, and no sequence may exceed {MAX_SEQUENCE} tokens"
            )
    return offsets


def times(name: str, value: object, length: int) -> torch.Tensor:
    """int64 timestamps, one per token, small enough that no difference of two overflows."""
    times = tensor(name, value, dims=1, dtype=torch.int64)
    if times.numel() != length:
        raise ValueError(f"{name} must have one entry per token ({length}), got {times.numel()}")
    if length and times.device.type == "cpu":
        low, high = torch.aminmax(times)
        if int(low) <= -MAX_TIME or int(high) >= MAX_TIME:
            raise ValueError(
                f"{name} must stay within -2^62 and 2^62, got {int(low)} to {int(high)}"
            )
    return times


def number(name: str, value: object, *, positive: bool = False) -> float:
    """A finite number; with `positive` above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} must be finite, got {value}")
    if positive and number <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return number
