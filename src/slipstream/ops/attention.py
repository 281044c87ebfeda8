"""Jagged attention of generative recommenders with the relative bias inside: HSTU's one channel and
FuXi's three.

Sequences lie end to end (values + offsets, never padded). Key j of a sequence stands at position j;
the queries are the tail of the keys, so query i stands at k_len - q_len + i. Everything is causal.
The last `num_candidates_B[b]` tokens are candidates: they all stand at the position after the
history, and each sees the history and itself only. `window` keeps the keys fewer than that many
positions back. No back-end ever stores anything of size length x length.
"""

import torch

from slipstream.ops import attention_native, attention_reference, backend
from slipstream.ops.attention_types import (
    AttentionArguments,
    RelativeBias,
    check_arguments,
    time_bucket_borders,
)

__all__ = ["RelativeBias", "fuxi_attention", "hstu_attention", "time_bucket_borders"]


def hstu_attention(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor | None = None,
    *,
    divisor: float,
    scale: float = 1.0,
    bias: RelativeBias | None = None,
    timestamps_T: torch.Tensor | None = None,
    k_timestamps_S: torch.Tensor | None = None,
    num_candidates_B: torch.Tensor | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """out_THV[i] = sum over visible j of SiLU(scale q_i·k_j + position bias + time bias) / divisor
    · v_j.

    `timestamps_T` are the queries' look-back times, `k_timestamps_S` the keys' own (the same tensor
    unless given).
    """
    arguments = check_arguments(
        q_THK,
        k_SHK,
        v_SHV,
        q_offsets_B1,
        k_offsets_B1,
        divisor=divisor,
        scale=scale,
        bias=bias,
        timestamps_T=timestamps_T,
        k_timestamps_S=k_timestamps_S,
        num_candidates_B=num_candidates_B,
        window=window,
    )
    return _serve(arguments, backend, fuxi=False)


def fuxi_attention(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor | None = None,
    *,
    divisor: float,
    scale: float = 1.0,
    bias: RelativeBias | None = None,
    timestamps_T: torch.Tensor | None = None,
    k_timestamps_S: torch.Tensor | None = None,
    num_candidates_B: torch.Tensor | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """out_T3HV: SiLU(scale q·k) / divisor · v, time bias · v and position bias · v over the visible
    keys (absent table: zeros).
    """
    arguments = check_arguments(
        q_THK,
        k_SHK,
        v_SHV,
        q_offsets_B1,
        k_offsets_B1,
        divisor=divisor,
        scale=scale,
        bias=bias,
        timestamps_T=timestamps_T,
        k_timestamps_S=k_timestamps_S,
        num_candidates_B=num_candidates_B,
        window=window,
    )
    return _serve(arguments, backend, fuxi=True)


def _serve(arguments: AttentionArguments, requested: str | None, *, fuxi: bool) -> torch.Tensor:
    chosen = backend.choose(requested, arguments.q_THK, has_triton=True)
    if chosen == "native":
        return attention_native.attention(arguments, fuxi=fuxi)
    if chosen == "triton":
        from slipstream.ops import (
            attention_triton,  # needs triton, which a machine without an accelerator need not have
        )

        return attention_triton.attention(arguments, fuxi=fuxi)
    return (
        attention_reference.fuxi_attention(arguments)
        if fuxi
        else attention_reference.hstu_attention(arguments)
    )
