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
        entry_TN, absent_TN = _entries(groups, per_set, group_T, columns_N)
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
    hidden_TD, groups, per_set = inputs.hidden_TD, inputs.groups, inputs.negatives_XR.shape[1]
    starts_G1 = weight_starts(groups, per_set, 1)
    weights = hidden_TD.new_empty(int(starts_G1[-1])) if weights is None else weights
    loss_T, unit_TD = hidden_TD.new_zeros(len(hidden_TD)), torch.zeros_like(hidden_TD)
    target_weights_T, group_T = torch.zeros_like(loss_T), groups.of_tokens()
    most = int(groups.set_offsets_G1.diff().max()) * per_set if groups.count else 0
    step = max(1, VALUES_PER_SLICE // max(1, (most + 1) * hidden_TD.shape[1]))
    columns_N = torch.arange(most, device=hidden_TD.device)
    for first in range(0, len(hidden_TD), step):
        tokens = slice(first, first + step)
        entry_TN, absent_TN = _entries(groups, per_set, group_T[tokens], columns_N)
        rows_TND = inputs.rows_UD[inputs.negatives_XR.reshape(-1)[entry_TN]]
        loss_T[tokens], weights_TN = _slice_loss(inputs, tokens, entry_TN, absent_TN, rows_TND)
        target_weights_T[tokens] = -weights_TN.sum(1)
        unit_TD[tokens] = (
            torch.einsum("tn,tnd->td", weights_TN, rows_TND)
            + target_weights_T[tokens].unsqueeze(1) * inputs.targets_TD[tokens]
        )
        place_TN = _weight_places(groups, per_set, starts_G1, group_T[tokens], first, columns_N)
        weights[place_TN[~absent_TN]] = weights_TN[~absent_TN]
    kept = GroupWeights(groups, per_set, 1, starts_G1, weights, target_weights_T, unit_TD)
    return loss_T, kept


def _entries(
    groups: TokenGroups, per_set: int, group_T: torch.Tensor, columns_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's entries in the negatives, and which of them its group does not have."""
    entry_TN = (groups.set_offsets_G1[group_T] * per_set).unsqueeze(1) + columns_N
    absent_TN = entry_TN >= (groups.set_offsets_G1[group_T + 1] * per_set).unsqueeze(1)
    return entry_TN.masked_fill(absent_TN, 0), absent_TN


def _weight_places(
    groups: TokenGroups,
    per_set: int,
    starts_G1: torch.Tensor,
    group_T: torch.Tensor,
    first: int,
    columns_N: torch.Tensor,
) -> torch.Tensor:
    """Where the weights of tokens `first` … lie: token after token within a group."""
    token_T = torch.arange(first, first + len(group_T), device=group_T.device)
    member_T = token_T - groups.offsets_G1[group_T]
    negatives_T = groups.set_offsets_G1.diff()[group_T] * per_set
    return (starts_G1[group_T] + member_T * negatives_T).unsqueeze(1) + columns_N


def _slice_loss(
    inputs: GroupedSoftmaxInputs,
    tokens: slice,
    entry_TN: torch.Tensor,
    absent_TN: torch.Tensor,
    rows_TND: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of some tokens, and their weights for each of their negatives."""
    hidden_TD = inputs.hidden_TD[tokens]
    target_T = (hidden_TD * inputs.targets_TD[tokens]).sum(1) / inputs.temperature
    logits_TN = torch.einsum("td,tnd->tn", hidden_TD, rows_TND) / inputs.temperature
    if inputs.target_log_q_T is not None:
        target_T = target_T - inputs.target_log_q_T[tokens]
    if inputs.negative_log_q_XR is not None:
        logits_TN = logits_TN - inputs.negative_log_q_XR.reshape(-1)[entry_TN]
    own_TN = inputs.negatives_XR.reshape(-1)[entry_TN] == inputs.same_T[tokens].unsqueeze(1)
    logits_TN = logits_TN.masked_fill(absent_TN | own_TN, float("-inf"))
    total_T = torch.logsumexp(torch.cat([target_T.unsqueeze(1), logits_TN], dim=1), dim=1)
    weights_TN = (logits_TN - total_T.unsqueeze(1)).exp() / inputs.temperature
    return total_T - target_T, weights_TN


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
        which_P = torch.arange(len(entry_E), device=entry_E.device).repeat_interleave(members_E)
        place_P = torch.arange(len(which_P), device=entry_E.device)
        member_P = place_P - (members_E.cumsum(0) - members_E)[which_P]
        group_P = group_E[which_P]
        negatives_P = groups.set_offsets_G1.diff()[group_P] * weights.per_set
        column_P = entry_E[which_P] - groups.set_offsets_G1[group_P] * weights.per_set
        weights_P = weights.weights[weights.starts_G1[group_P] + member_P * negatives_P + column_P]
        out_UD.index_add_(
            0,
            row_E[which_P],
            weights_P.unsqueeze(1) * source_TD[groups.offsets_G1[group_P] + member_P],
        )
