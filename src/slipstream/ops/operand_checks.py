"""Checks of what callers hand to the fused neighbours, the row operators and the losses.

Native code trusts its pointers, so every shape, dtype, device and index is checked here first, once, with a sentence that names
the operand and what was expected of it.
"""

import torch


def _plain(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a plain strided tensor, got layout {tensor.layout}")


def floating(name: str, tensor: torch.Tensor, *, dims: int) -> None:
    """`tensor` is a floating-point tensor of `dims` dimensions."""
    _plain(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), got shape {tuple(tensor.shape)}")


def like(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor, shape: tuple[int, ...]) -> None:
    """`tensor` has the given shape and the dtype and device of `other`."""
    _plain(name, tensor)
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name} ({other.dtype}), got {tensor.dtype}")
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name} ({other.device}), got {tensor.device}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} to fit {other_name}, got {tuple(tensor.shape)}")


def integers(name: str, tensor: torch.Tensor, *, shape: tuple[int | None, ...], device: torch.device | None = None) -> None:
    """`tensor` is int64 on `device` with the given shape, where None stands for any."""
    _plain(name, tensor)
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    fits = tensor.dim() == len(shape) and all(want is None or want == got for want, got in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def index(name: str, tensor: torch.Tensor, size: int, *, shape: tuple[int | None, ...], device: torch.device) -> None:
    """`tensor` is an int64 index into `size` rows."""
    integers(name, tensor, shape=shape, device=device)
    if tensor.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(tensor))
    if low < 0 or high >= size:
        raise IndexError(f"{name} must lie between 0 and {size - 1}, got {low if low < 0 else high}")


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
