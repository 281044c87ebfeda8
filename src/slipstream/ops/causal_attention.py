"""Causal softmax attention over jagged tokens, for SASRec.

The plain loop over sequences serves cached prefixes and candidates, and tests compare with it.
Training (every token a query, no candidates) uses torch's own fused kernel: sequences of similar
length share a padded batch. Padding stands behind the real tokens, where no token sees it. How far
a sequence is padded depends on its own length alone, so its result does not depend on the other
sequences of the batch. There is no back-end to choose. Touch this when SASRec's attention changes.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

_STEP = 32  # lengths are rounded up to a multiple of this; one padded batch for each


def softmax_attention(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor | None = None,
    *,
    num_candidates_B: torch.Tensor | None = None,
    scale: float,
) -> torch.Tensor:
    """out_i = sum over visible j of softmax_j(scale * q_i·k_j) v_j, [T, H, V].

    The queries are the tail of the keys. The last `num_candidates_B[b]` keys of sequence b are
    candidates: each sees the history and itself only. Differentiable in q, k and v.
    """
    k_offsets_B1 = q_offsets_B1 if k_offsets_B1 is None else k_offsets_B1
    _check(q_THK, k_SHK, v_SHV, q_offsets_B1, k_offsets_B1)
    if num_candidates_B is not None or not torch.equal(q_offsets_B1, k_offsets_B1):
        return softmax_attention_reference(
            q_THK,
            k_SHK,
            v_SHV,
            q_offsets_B1,
            k_offsets_B1,
            num_candidates_B=num_candidates_B,
            scale=scale,
        )
    return _padded_attention(q_THK, k_SHK, v_SHV, q_offsets_B1, scale)


def softmax_attention_reference(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor,
    *,
    num_candidates_B: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """`softmax_attention` one sequence after the other, by the formula."""
    q_starts, k_starts = q_offsets_B1.tolist(), k_offsets_B1.tolist()
    candidates = (
        [0] * (len(q_starts) - 1) if num_candidates_B is None else num_candidates_B.tolist()
    )
    outs = [q_THK.new_zeros(0, q_THK.shape[1], v_SHV.shape[2])]
    for b, num_candidates in enumerate(candidates):
        q = q_THK[q_starts[b] : q_starts[b + 1]].transpose(0, 1)
        k = k_SHK[k_starts[b] : k_starts[b + 1]].permute(1, 2, 0)
        v = v_SHV[k_starts[b] : k_starts[b + 1]].transpose(0, 1)
        visible = _visible(q.shape[1], v.shape[1], num_candidates, q.device)
        weights = (scale * (q @ k)).masked_fill(~visible, float("-inf")).softmax(dim=-1)
        outs.append((weights @ v).transpose(0, 1))
    return torch.cat(outs)


def _visible(
    num_queries: int, num_keys: int, num_candidates: int, device: torch.device
) -> torch.Tensor:
    """bool [queries, keys]: tokens see themselves and what came before, but no other candidate."""
    place_Q1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    place_K = torch.arange(num_keys, device=device)
    return (place_K == place_Q1) | ((place_K < place_Q1) & (place_K < num_keys - num_candidates))


def _padded_attention(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    offsets_B1: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    width, value_width = q_THK.shape[2], v_THV.shape[2]
    if width != value_width:  # the fused kernel wants one width; zeros add nothing
        wide = max(width, value_width)
        q_THK, k_THK, v_THV = (pad(x, (0, wide - x.shape[2])) for x in (q_THK, k_THK, v_THV))
    padded_lengths_B, rows_P, places_T = _padded_order(offsets_B1)
    q_PHK, k_PHK, v_PHV = (x.index_select(0, rows_P) for x in (q_THK, k_THK, v_THV))
    # Sorted, as the padded order is.
    lengths, counts = torch.unique(padded_lengths_B, return_counts=True)
    sizes = (lengths * counts).tolist()
    pieces = [v_PHV[:0]]
    for length, q, k, v in zip(
        lengths.tolist(), *(torch.split(x, sizes) for x in (q_PHK, k_PHK, v_PHV)), strict=True
    ):
        if length:
            q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
            pieces.append(
                scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
                .transpose(1, 2)
                .flatten(0, 1)
            )
    return torch.cat(pieces).index_select(0, places_T)[:, :, :value_width]


def _padded_order(offsets_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences by padded length: (those lengths, the token of each place, each token's place)."""
    lengths_B = offsets_B1.diff()
    padded_B, order_B = ((lengths_B + _STEP - 1) // _STEP * _STEP).sort(stable=True)
    sequence_P = order_B.repeat_interleave(padded_B)
    starts_P = (padded_B.cumsum(0) - padded_B).repeat_interleave(padded_B)
    place_P = torch.arange(sequence_P.numel(), device=offsets_B1.device) - starts_P
    real_P = place_P < lengths_B[sequence_P]
    rows_P = torch.where(real_P, offsets_B1[sequence_P] + place_P, 0)
    places_T = torch.empty_like(rows_P[: int(lengths_B.sum())])
    places_T[rows_P[real_P]] = real_P.nonzero().squeeze(1)
    return padded_B, rows_P, places_T


def _check(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor,
) -> None:
    if q_THK.dim() != 3 or k_SHK.dim() != 3 or v_SHV.dim() != 3:
        raise ValueError("q, k and v must be [tokens, heads, width]")
    if q_THK.shape[1:] != k_SHK.shape[1:] or k_SHK.shape[:2] != v_SHV.shape[:2]:
        raise ValueError(
            f"q {tuple(q_THK.shape)}, k {tuple(k_SHK.shape)} and v {tuple(v_SHV.shape)} do not "
            "belong together"
        )
    if q_offsets_B1.shape != k_offsets_B1.shape:
        raise ValueError("queries and keys must hold the same number of sequences")
    if int(q_offsets_B1[-1]) != q_THK.shape[0] or int(k_offsets_B1[-1]) != k_SHK.shape[0]:
        raise ValueError("offsets must end at the number of tokens")
    if bool((q_offsets_B1.diff() > k_offsets_B1.diff()).any()):
        raise ValueError(
            "a sequence has more queries than keys; the queries must be the tail of the keys"
        )
