"""The grouped softmax in plain PyTorch; the compiled one is tested against it.

`grouped_softmax_loss` leaves its gradients to autograd. `score`, `sort_into_buckets` and
`add_bucket_gradients` compute the same in steps, for a fetch in segments: weights first, the rows'
gradient later. Touch this only when what the grouped softmax computes changes.
"""

import torch

from slipstream.ops.grouped_types import (
    GroupedSoftmaxInputs,
    GroupWeights,
    TokenGroups,
    weight_starts,
)
from slipstream.ops.losses_reference import VALUES_PER_SLICE, sliced, subtract, target_loss


def grouped_softmax_loss(inputs: GroupedSoftmaxInputs) -> torch.Tensor:
    """Each token against all negatives of its group."""
    hidden_TD, targets_TD, rows_UD = inputs.hidden_TD, inputs.targets_TD, inputs.rows_UD
    groups, temperature = inputs.groups, inputs.temperature
    per_set = inputs.negatives_XR.shape[1]
    most = int(groups.set_offsets_G1.diff().max()) * per_set if groups.count else 0
    columns_N = torch.arange(most, device=hidden_TD.device)
    flat_E = inputs.negatives_XR.reshape(-1)

    def piece(
        h_TD: torch.Tensor,
        t_TD: torch.Tensor,
        s_T: torch.Tensor,
        group_T: torch.Tensor,
        tq_T: torch.Tensor | None,
    ) -> torch.Tensor:
        begin_T = groups.set_offsets_G1[group_T] * per_set
        end_T = groups.set_offsets_G1[group_T + 1] * per_set
        entry_TN = begin_T.unsqueeze(1) + columns_N
        absent_TN = entry_TN >= end_T.unsqueeze(1)
        entry_TN = entry_TN.masked_fill(absent_TN, 0)
        index_TN = flat_E[entry_TN]
        target_T1 = (h_TD * t_TD).sum(dim=1, keepdim=True) / temperature
        negative_TN = torch.einsum("td,tnd->tn", h_TD, rows_UD[index_TN]) / temperature
        target_T1 = subtract(target_T1, None if tq_T is None else tq_T.unsqueeze(1))
        if inputs.negative_log_q_XR is not None:
            negative_TN = negative_TN - inputs.negative_log_q_XR.reshape(-1)[entry_TN]
        return target_loss(target_T1, negative_TN, absent_TN | (index_TN == s_T.unsqueeze(1)))

    if most == 0:
        return (hidden_TD[:, :0] * targets_TD[:, :0]).sum(1) + rows_UD[:0].sum()
    values_per_token = (most + 1) * max(hidden_TD.shape[1], 1)
    per_token = (hidden_TD, targets_TD, inputs.same_T, groups.of_tokens(), inputs.target_log_q_T)
    return sliced(piece, len(hidden_TD), values_per_token, *per_token)


def block_size(groups: TokenGroups) -> int:
    """Each token's weights lie on their own here."""
    return 1


def score(
    inputs: GroupedSoftmaxInputs, *, block: int = 1, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, GroupWeights]:
    """loss_T and what the gradients need; `weights` is memory for the weights, if given."""
    if block != 1:
        raise ValueError(
            f"the plain score keeps every token's weights on their own, not blocks of {block}"
        )
    hidden_TD, groups = inputs.hidden_TD, inputs.groups
    starts_G1 = weight_starts(groups, inputs.negatives_XR.shape[1], 1)
    weights = hidden_TD.new_empty(int(starts_G1[-1])) if weights is None else weights
    loss_T, unit_TD = hidden_TD.new_zeros(len(hidden_TD)), torch.zeros_like(hidden_TD)
    target_weights_T = torch.zeros_like(loss_T)
    for g in range(groups.count):
        tokens, sets = (
            slice(*offsets[g : g + 2].tolist())
            for offsets in (groups.offsets_G1, groups.set_offsets_G1)
        )
        rows_ND = inputs.rows_UD[inputs.negatives_XR[sets].reshape(-1)]
        loss_T[tokens], weights_MN = _group_loss(inputs, tokens, sets, rows_ND)
        target_weights_T[tokens] = -weights_MN.sum(1)
        unit_TD[tokens] = (
            weights_MN @ rows_ND + target_weights_T[tokens].unsqueeze(1) * inputs.targets_TD[tokens]
        )
        weights[starts_G1[g] : starts_G1[g + 1]] = weights_MN.reshape(-1)
    kept = GroupWeights(
        groups, inputs.negatives_XR.shape[1], 1, starts_G1, weights, target_weights_T, unit_TD
    )
    return loss_T, kept


def _group_loss(
    inputs: GroupedSoftmaxInputs, tokens: slice, sets: slice, rows_ND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one group's tokens, and their weights for each of its negatives."""
    index_N, hidden_MD = inputs.negatives_XR[sets].reshape(-1), inputs.hidden_TD[tokens]
    target_M = (hidden_MD * inputs.targets_TD[tokens]).sum(1) / inputs.temperature
    logits_MN = hidden_MD @ rows_ND.T / inputs.temperature
    if inputs.target_log_q_T is not None:
        target_M = target_M - inputs.target_log_q_T[tokens]
    if inputs.negative_log_q_XR is not None:
        logits_MN = logits_MN - inputs.negative_log_q_XR[sets].reshape(-1)
    same_M1 = inputs.same_T[tokens].unsqueeze(1)
    logits_MN = logits_MN.masked_fill(index_N == same_M1, float("-inf"))
    total_M = torch.logsumexp(torch.cat([target_M.unsqueeze(1), logits_MN], dim=1), dim=1)
    weights_MN = (logits_MN - total_M.unsqueeze(1)).exp() / inputs.temperature
    return total_M - target_M, weights_MN


def sort_into_buckets(
    keys_E: torch.Tensor, below: int, buckets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order the entries by bucket of near keys: (order_E int32, starts int64 [buckets + 1])."""
    bucket_E = torch.div(keys_E.reshape(-1) * buckets, below, rounding_mode="floor")
    counts = torch.bincount(bucket_E, minlength=buckets)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return bucket_E.argsort(stable=True).to(torch.int32), starts


def add_bucket_gradients(
    out_UD: torch.Tensor,
    source_TD: torch.Tensor,
    weights: GroupWeights,
    group_of_set_X: torch.Tensor,
    order_E: torch.Tensor,
    starts: torch.Tensor,
    buckets: tuple[int, int],
    rows: torch.Tensor,
    *,
    by_position: bool,
) -> None:
    """Add the gradients of the negatives in buckets first … last - 1 to rows of `out_UD`."""
    groups = weights.groups
    begin, end = (int(starts[bucket]) for bucket in buckets)
    step = max(1, VALUES_PER_SLICE // max(1, groups.largest * out_UD.shape[1]))
    for first in range(begin, end, step):
        last = min(first + step, end)
        entry_E = order_E[first:last].to(torch.int64)
        row_E = rows[first - begin : last - begin] if by_position else rows.reshape(-1)[entry_E]
        group_E = group_of_set_X[entry_E // weights.per_set].to(torch.int64)
        members_E = groups.offsets_G1.diff()[group_E]
        which_P = torch.arange(len(entry_E)).repeat_interleave(members_E)
        member_P = torch.arange(len(which_P)) - (members_E.cumsum(0) - members_E)[which_P]
        group_P = group_E[which_P]
        negatives_P = groups.set_offsets_G1.diff()[group_P] * weights.per_set
        column_P = entry_E[which_P] - groups.set_offsets_G1[group_P] * weights.per_set
        weights_P = weights.weights[weights.starts_G1[group_P] + member_P * negatives_P + column_P]
        out_UD.index_add_(
            0,
            row_E[which_P],
            weights_P.unsqueeze(1) * source_TD[groups.offsets_G1[group_P] + member_P],
        )
