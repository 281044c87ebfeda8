"""The one place where a back-end is chosen.

`reference` is plain PyTorch, and every test compares with it; `native` is C++ for CPUs; `triton`
serves CUDA and Ascend devices. An argument beats the environment variable SLIPSTREAM_BACKEND, which
beats the default: native where it was built and the tensors are fp32 on a CPU, triton for
accelerator tensors, reference otherwise (fp64 above all). Touch this when a back-end is added.
"""

import os
from typing import Literal

import torch

from slipstream.errors import did_you_mean
from slipstream.ops import native

Backend = Literal["reference", "native", "triton"]
BACKENDS: tuple[Backend, ...] = ("reference", "native", "triton")


def choose(
    requested: str | None,
    example: torch.Tensor,
    *,
    has_native: bool = True,
    has_triton: bool = False,
) -> Backend:
    """The back-end for an operator called with tensors like `example`.

    `has_native` and `has_triton`: which back-ends this operator has besides the reference. A
    back-end named by argument must be able to serve, or an error is raised; where one named by the
    environment cannot serve, the reference does.
    """
    name = requested or os.environ.get("SLIPSTREAM_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"unknown back-end '{name}'{did_you_mean(name, BACKENDS)}")
    can_native = (
        has_native
        and example.device.type == "cpu"
        and example.dtype == torch.float32
        and native.available()
    )
    can_triton = has_triton and (
        example.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    )
    possible = {"reference": True, "native": can_native, "triton": can_triton}
    if name is None:
        on_accelerator = example.device.type != "cpu"
        return (
            "triton" if on_accelerator and can_triton else "native" if can_native else "reference"
        )
    if possible[name]:
        return name
    if requested is None:
        return "reference"
    if name == "native":
        raise ValueError(
            "back-end 'native' needs fp32 tensors on a CPU, an operator that has it, and compiled "
            "kernels; "
            f"got {example.dtype} on {example.device.type} ({native.status()})"
        )
    raise ValueError(
        "back-end 'triton' needs an accelerator, or TRITON_INTERPRET=1 to interpret its kernels "
        "on a CPU"
    )
