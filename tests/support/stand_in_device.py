"""A stand-in for an accelerator: its tensors refuse to be mixed with host tensors.

It shows that everything which must be on the device is there and comes back from it; it knows no
streams and says nothing of speed. Importing it changes torch for the whole process: tests use it in
a process of their own.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "standin"


class _Module(_DummyBackendModule):
    """What torch asks of a device's module (`torch.cuda` is one)."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]


_setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)
_BETWEEN_DEVICES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class OnDevice(torch.Tensor):
    """Says it lies on the device; `raw` is the host tensor that holds its values."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "OnDevice":
        like = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, device=DEVICE, **like)  # type: ignore[attr-defined]

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    def tolist(self) -> Any:  # torch refuses this one for subclasses
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, of_the_host = dict(kwargs or {}), []

        def raw(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) and value.dim():
                of_the_host.append(tuple(value.shape))
            return value.raw if isinstance(value, OnDevice) else value

        target = torch.device(kwargs.pop("device", None) or DEVICE)
        raw_args, raw_kwargs = tree_map(raw, args), tree_map(raw, kwargs)
        if of_the_host and func not in _BETWEEN_DEVICES:
            raise RuntimeError(
                f"{func} mixes tensors of the device with host tensors of shapes {of_the_host}"
            )
        result = func(*raw_args, **raw_kwargs)
        if func._schema.is_mutable and isinstance(result, torch.Tensor):
            return kwargs["out"] if "out" in kwargs else args[0]
        return (
            result
            if target.type == "cpu"
            else tree_map(lambda x: cls(x) if type(x) is torch.Tensor else x, result)
        )


def _empty(size: Any, dtype: Any = None, **options: Any) -> Any:
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **options: Any) -> Any:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _arange(*bounds: Any, dtype: Any = None, **options: Any) -> Any:
    return OnDevice(torch.arange(*bounds, dtype=dtype))


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    (target.raw if isinstance(target, OnDevice) else target).copy_(
        source.raw if isinstance(source, OnDevice) else source
    )
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
for overload in ("arange", "arange.start", "arange.start_step"):
    _LIBRARY.impl(overload, _arange, "PrivateUse1")
