"""Where the dense part computes: the host, or an accelerator to which each step's rows are copied.

Tables, keys and their exchange stay in host memory, so tables may outgrow a device; parameters and
activations live on the device. Rows are copied from pinned memory by a stream of their own, so that
a schedule's host-to-device lane overlaps compute; autograd brings their gradients back to the host
leaves that the exchange collects. On the host itself nothing is copied. Touch this for another kind
of accelerator.
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
    """Find the device a recipe names: cpu, an accelerator, one by number, or auto.

    An accelerator without a number is this rank's own under torchrun.
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
    """Return the back-ends of process groups: gloo for host tensors, the device's own for its."""
    return _GROUPS.get(device.type, "gloo")


@dataclass(frozen=True)
class DeviceInputs:
    """Something on the device, and the moment from which it may be read."""

    content: Any
    ready: Any | None  # an event of the copying stream; None: at once


class DeviceTransfer:
    """Copies tensors to one device. Each method is called by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module = None if device == HOST else torch.get_device_module(device)
        has_streams = hasattr(module, "Stream") and hasattr(module, "stream")
        self._module = module if has_streams else None  # without streams, copies are in order
        self._stream = None if self._module is None else self._module.Stream(device=device)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device; where the host's takes part in a graph, so does the copy."""
        if self.device == HOST:
            return host
        return _CopyToDevice.apply(host, self) if host.requires_grad else self._copy(host)

    @contextmanager
    def ahead_of_compute(self) -> Iterator[None]:
        """Copy inside this context by a stream of its own; `mark` the copies before leaving."""
        if self._module is None:
            yield
        else:
            with self._module.stream(self._stream):
                yield

    def mark(self, content: Any) -> DeviceInputs:
        """Return what was copied, with the event after which it may be read."""
        return DeviceInputs(content, None if self._stream is None else self._stream.record_event())

    def receive(self, inputs: DeviceInputs) -> Any:
        """Let the current stream wait for what was copied, and return it."""
        if inputs.ready is not None and self._module is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(inputs.ready)
            for tensor in tensors_in(inputs.content):
                if tensor.device != HOST:  # its memory is not reused before compute is done with it
                    tensor.record_stream(current)
        return inputs.content

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        if self._module is None:
            return host.detach().to(self.device)
        return host.detach().pin_memory().to(self.device, non_blocking=True)


class _CopyToDevice(torch.autograd.Function):
    """Copies from host to device; the gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, host: torch.Tensor, transfer: DeviceTransfer) -> torch.Tensor:
        return transfer._copy(host)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(HOST), None


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside dataclasses, mappings and sequences."""
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
