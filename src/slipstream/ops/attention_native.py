"""Attention through the compiled kernels of native/attention_*.cpp: fp32 on a CPU.

Forward keeps nothing but the inputs; backward computes the scores again. Touch this together with
`AttentionCall` in native/attention_plan.h.
"""

import ctypes
from typing import Any

import torch

from slipstream.ops import native
from slipstream.ops.attention_types import TIME_UNIT, AttentionArguments
from slipstream.ops.kernel_call import differentiable, kernel

_POINTERS = (
    "q", "k", "v", "q_offsets", "k_offsets", "q_times", "k_times", "candidates", "position", "time",
    "borders", "decay", "out", "grad_out", "grad_q", "grad_k", "grad_v", "grad_position",
    "grad_time", "grad_decay",
)  # fmt: skip
_SIZES = (
    "sequences", "heads", "key_width", "value_width", "position_entries", "time_entries", "window",
)  # fmt: skip


class _Call(ctypes.Structure):
    """`AttentionCall` of native/attention_plan.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("inverse_divisor", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("time_unit", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("channels", ctypes.c_int32),
    )


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


def _run(
    function: str, a: AttentionArguments, channels: int, **outputs: torch.Tensor | None
) -> None:
    tensors = {
        "q": a.q_THK,
        "k": a.k_SHK,
        "v": a.v_SHV,
        "q_offsets": a.q_offsets_B1,
        "k_offsets": a.k_offsets_B1,
        "q_times": a.timestamps_T,
        "k_times": a.k_timestamps_S,
        "candidates": a.num_candidates_B,
        "position": a.position_P,
        "time": a.time_W,
        "borders": a.borders_W,
        "decay": a.decay_3,
    } | outputs
    kept = {
        name: tensor.contiguous() if tensor is not None else None
        for name, tensor in tensors.items()
    }
    call = _Call(
        **{name: native.address(tensor) for name, tensor in kept.items()},
        sequences=a.q_offsets_B1.numel() - 1,
        heads=a.q_THK.shape[1],
        key_width=a.q_THK.shape[2],
        value_width=a.v_SHV.shape[2],
        position_entries=_size(a.position_P),
        time_entries=_size(a.time_W),
        window=a.window or 0,
        inverse_divisor=1.0 / a.divisor,
        scale=a.scale,
        time_unit=TIME_UNIT,
        threads=torch.get_num_threads(),
        channels=channels,
    )
    if kernel(function)(ctypes.byref(call)) != 0:
        raise MemoryError(
            "the native attention could not get its scratch memory; use shorter sequences or "
            "fewer threads"
        )


class _NativeAttention(torch.autograd.Function):
    """One call of the operator; tensors that carry gradients come one by one, the rest in `a`."""

    @staticmethod
    def forward(
        ctx: Any,
        a: AttentionArguments,
        channels: int,
        *leaves: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty(a.output_shape(channels))
        _run("ss_attention_forward", a, channels, out=out)
        ctx.save_for_backward(*leaves)
        ctx.arguments, ctx.channels = a, channels
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a: AttentionArguments = ctx.arguments
        _ = ctx.saved_tensors  # raises if an input was changed in place since the forward pass
        grads = [None if tensor is None else torch.empty(tensor.shape) for tensor in a.leaves]
        names = ("grad_q", "grad_k", "grad_v", "grad_position", "grad_time", "grad_decay")
        _run(
            "ss_attention_backward",
            a,
            ctx.channels,
            grad_out=grad_out,
            **dict(zip(names, grads, strict=True)),
        )
        return (None, None, *grads)


_attention = differentiable(_NativeAttention)


def attention(a: AttentionArguments, *, fuxi: bool) -> torch.Tensor:
    """HSTU's attention, or with `fuxi` FuXi's three channels, by the compiled kernels."""
    return _attention(a, 3 if fuxi else 1, *a.leaves)
