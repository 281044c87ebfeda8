"""Jagged attention with relative bias: HSTU's one channel and FuXi's three.

Sequences lie end to end (values and offsets, never padded). Key j of a sequence stands at position
j. The queries are the last tokens of the keys, so query i stands at position k_len - q_len + i.
Everything is causal. The last `num_candidates_B[b]` tokens are candidates: all stand at the
position after the history, and each sees the history and itself only. No back-end stores anything
of size length x length.

Touch this when the operators' arguments change; the options are in attention_types.py, the
arithmetic in attention_reference.py, attention_native.py and attention_triton.py.
"""

from typing import Unpack

import torch

from slipstream.ops import attention_native, attention_reference
from slipstream.ops import backend as backends
from slipstream.ops.attention_types import (
    AttentionArguments,
    AttentionOptions,
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
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """out_THV[i] = sum over visible j of SiLU(scale q_i·k_j + bias_ij) / divisor · v_j.

    bias_ij is the position bias plus the time bias. `k_offsets_B1` is needed only where there are
    more keys than queries. The other options are those of `AttentionOptions`.
    """
    arguments = check_arguments(q_THK, k_SHK, v_SHV, q_offsets_B1, k_offsets_B1, **options)
    return _dispatch(arguments, backend, fuxi=False)


def fuxi_attention(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor | None = None,
    *,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """out_T3HV: SiLU(scale q·k) / divisor · v, time bias · v, position bias · v over visible keys.

    The channel of an absent bias is zero. Arguments are those of `hstu_attention`.
    """
    arguments = check_arguments(q_THK, k_SHK, v_SHV, q_offsets_B1, k_offsets_B1, **options)
    return _dispatch(arguments, backend, fuxi=True)


def _dispatch(arguments: AttentionArguments, backend: str | None, *, fuxi: bool) -> torch.Tensor:
    """Call the back-end that serves these tensors."""
    chosen = backends.choose(backend, arguments.q_THK, has_triton=True)
    if chosen == "native":
        return attention_native.attention(arguments, fuxi=fuxi)
    if chosen == "triton":
        # Imported here: a machine without an accelerator need not have triton.
        from slipstream.ops import attention_triton

        return attention_triton.attention(arguments, fuxi=fuxi)
    return attention_reference.attention(arguments, fuxi=fuxi)
