"""The attention operators in plain PyTorch, one sequence at a time.

Slow and short: every other back-end is tested against it. It works in any floating dtype on any
device; gradients come from autograd. Touch this only when what attention computes changes.
"""

import torch

from slipstream.ops.attention_types import TIME_UNIT, AttentionArguments


def bucket_of(difference: torch.Tensor, borders_W: torch.Tensor) -> torch.Tensor:
    """The time bucket of |difference| (int64): the last border that does not exceed it."""
    return torch.bucketize(difference.abs(), borders_W, right=True) - 1


def time_decay(difference: torch.Tensor, decay_3: torch.Tensor) -> torch.Tensor:
    """The functional time bias of |difference|: a · exp(-b · u^c), u in days."""
    a, b, c = decay_3.unbind()
    days = difference.abs().to(decay_3.dtype) / TIME_UNIT
    return a * torch.exp(-b * torch.pow(days, c))


def visible_and_biases(
    a: AttentionArguments, b: int, q0: int, q1: int, k0: int, k1: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask, time bias and position bias of sequence b (queries q0:q1, keys k0:k1), each [I, J]."""
    q_len, k_len, device = q1 - q0, k1 - k0, a.q_THK.device
    history = k_len - (int(a.num_candidates_B[b]) if a.num_candidates_B is not None else 0)
    query_I1 = torch.arange(k_len - q_len, k_len, device=device).unsqueeze(1)
    key_1J = torch.arange(k_len, device=device).unsqueeze(0)
    apart_IJ = query_I1.clamp(max=history) - key_1J.clamp(max=history)
    visible_IJ = ((key_1J < history) & (key_1J <= query_I1)) | (key_1J == query_I1)
    if a.window is not None:
        visible_IJ = visible_IJ & (apart_IJ < a.window)
    zero_IJ = torch.zeros(q_len, k_len, dtype=a.q_THK.dtype, device=device)
    time_IJ, position_IJ = zero_IJ, zero_IJ
    if a.timestamps_T is not None and a.k_timestamps_S is not None:
        difference_IJ = a.timestamps_T[q0:q1].unsqueeze(1) - a.k_timestamps_S[k0:k1].unsqueeze(0)
        if a.decay_3 is not None:
            time_IJ = time_decay(difference_IJ, a.decay_3)
        elif a.time_W is not None and a.borders_W is not None:
            time_IJ = a.time_W[bucket_of(difference_IJ, a.borders_W)]
    if a.position_P is not None:
        n = (a.position_P.numel() + 1) // 2
        position_IJ = a.position_P[apart_IJ.clamp(1 - n, n - 1) + n - 1]
    return visible_IJ, time_IJ, position_IJ


def _empty_output(a: AttentionArguments, shape: tuple[int, ...]) -> torch.Tensor:
    """The output of an empty batch; it depends on every input, so that all gradients are zeros."""
    return a.q_THK.new_zeros(shape) + sum(
        0 * tensor.sum() for tensor in a.leaves if tensor is not None
    )


def attention(a: AttentionArguments, *, fuxi: bool) -> torch.Tensor:
    """HSTU's attention, or with `fuxi` FuXi's three channels, in plain PyTorch."""
    return fuxi_attention(a) if fuxi else hstu_attention(a)


def hstu_attention(a: AttentionArguments) -> torch.Tensor:
    """SiLU(scale q·k + position bias + time bias) / divisor · v over the visible keys."""
    outputs = []
    for b, (q0, q1, k0, k1) in enumerate(a.spans()):
        visible_IJ, time_IJ, position_IJ = visible_and_biases(a, b, q0, q1, k0, k1)
        score_HIJ = a.scale * torch.einsum("ihk,jhk->hij", a.q_THK[q0:q1], a.k_SHK[k0:k1]) + (
            time_IJ + position_IJ
        )
        weight_HIJ = torch.where(visible_IJ, torch.nn.functional.silu(score_HIJ) / a.divisor, 0)
        outputs.append(torch.einsum("hij,jhv->ihv", weight_HIJ, a.v_SHV[k0:k1]))
    return torch.cat(outputs) if outputs else _empty_output(a, (0, *a.v_SHV.shape[1:]))


def fuxi_attention(a: AttentionArguments) -> torch.Tensor:
    """SiLU(scale q·k) / divisor · v, time bias · v and position bias · v, stacked on axis 1."""
    outputs = []
    for b, (q0, q1, k0, k1) in enumerate(a.spans()):
        visible_IJ, time_IJ, position_IJ = visible_and_biases(a, b, q0, q1, k0, k1)
        score_HIJ = a.scale * torch.einsum("ihk,jhk->hij", a.q_THK[q0:q1], a.k_SHK[k0:k1])
        weight_HIJ = torch.where(visible_IJ, torch.nn.functional.silu(score_HIJ) / a.divisor, 0)
        maps_3HIJ = torch.stack(
            [weight_HIJ]
            + [torch.where(visible_IJ, m, 0).expand_as(weight_HIJ) for m in (time_IJ, position_IJ)]
        )
        outputs.append(torch.einsum("chij,jhv->ichv", maps_3HIJ, a.v_SHV[k0:k1]))
    return torch.cat(outputs) if outputs else _empty_output(a, (0, 3, *a.v_SHV.shape[1:]))
