"""Where the dense part computes: the host, or an accelerator to which each step's rows are carried.

Tables, keys and their exchange stay in host memory, which is what lets tables outgrow a device;
parameters and activations live on the device. Rows are carried over from pinned memory by a stream
of their own, so that a schedule's host-to-device lane overlaps compute; autograd brings their
gradients back to the host leaves the exchange collects. On the host itself nothing is carried.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import SlipstreamError

HOST = torch.device("cpu")
_GROUPS = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def find_device(name: str) -> torch.device:
    """The device a recipe names: cpu, a kind of accelerator (under torchrun this rank's own), one
    by number, or auto.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        name = "cpu" if found is None else found.type
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return HOST
    if found is None or found.type != kind:
        here = "no accelerator" if found is None else f"a {found.type} device, not {kind}"
        raise SlipstreamError(
            f"device={name}: torch sees {here} here; use "
            f"device={'cpu' if found is None else found.type}"
        )
    index, count = (
        int(number or os.environ.get("LOCAL_RANK", "0")),
        torch.accelerator.device_count(),
    )
    if index >= count:
        raise SlipstreamError(
            f"device {kind}:{index} does not exist here: torch sees {count}; start fewer ranks on "
            "this machine"
        )
    return torch.device(kind, index)


def group_backend(device: torch.device) -> str:
    """The process groups' back-ends: host tensors always travel by gloo, a device's own by its own
    library where there is one.
    """
    return _GROUPS.get(device.type, "gloo")


@dataclass(frozen=True)
class DeviceInputs:
    """Something on the device, and the moment from which it may be read."""

    content: Any
    ready: Any | None  # an event of the carrying stream; None: at once


class DeviceTransfer:
    """Carries tensors to one device; each of its users is one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module = None if device == HOST else torch.get_device_module(device)
        self._module = (
            module if hasattr(module, "Stream") and hasattr(module, "stream") else None
        )  # else: copies are in order
        self._stream = None if self._module is None else self._module.Stream(device=device)

    def move(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor on the device; where the host's takes part in a graph, so does this one."""
        if self.device == HOST:
            return host
        return _Move.apply(host, self) if host.requires_grad else self._copy(host)

    @contextmanager
    def ahead_of_compute(self) -> Iterator[None]:
        """Inside, what is carried travels by the carrier's own stream; `mark` it before leaving."""
        if self._module is None:
            yield
        else:
            with self._module.stream(self._stream):
                yield

    def mark(self, content: Any) -> DeviceInputs:
        """What was carried, with the event after which it is there."""
        return DeviceInputs(content, None if self._stream is None else self._stream.record_event())

    def receive(self, carried: DeviceInputs) -> Any:
        """Compute's side: from here on, in the current stream's order, the content may be read."""
        if carried.ready is not None and self._module is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(carried.ready)
            for tensor in tensors_in(carried.content):
                if tensor.device != HOST:
                    tensor.record_stream(
                        current
                    )  # its memory is not given to the carrier again before compute is done with it
        return carried.content

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        if self._module is None:
            return host.detach().to(self.device)
        return host.detach().pin_memory().to(self.device, non_blocking=True)


class _Move(torch.autograd.Function):
    """Host to device; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, host: torch.Tensor, carrier: DeviceTransfer) -> torch.Tensor:
        return carrier._copy(host)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(HOST), None


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside dataclasses, mappings and sequences."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from tensors_in(value)
    elif hasattr(content, "__dataclass_fields__"):
        for name in content.__dataclass_fields__:
            yield from tensors_in(getattr(content, name))
