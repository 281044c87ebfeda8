"""Plain PyTorch of the grouped softmax, the oracle of the compiled one; tokens go through in
slices.

`grouped_softmax_loss` leaves its gradients to autograd; `score`, `deal` and `add_dealt` are the
same in pieces, for a fetch in segments: weights first, the rows' gradient later.
"""

import torch

from slipstream.ops.grouped_inputs import GroupedSoftmaxInputs
from slipstream.ops.losses_reference import VALUES_PER_SLICE, sliced, target_loss
from slipstream.ops.token_groups import Groups, Scored, weight_places


def grouped_softmax_loss(
    question: GroupedSoftmaxInputs,
) -> torch.Tensor:
    """Each token against all negatives of its group."""
    hidden_TD, targets_TD, same_T, rows_UD = (
        question.hidden_TD,
        question.targets_TD,
        question.same_T,
        question.rows_UD,
    )
    negatives_XR, groups, temperature = question.negatives_XR, question.groups, question.temperature
    target_log_q_T, negative_log_q_XR = question.target_log_q_T, question.negative_log_q_XR
    per_set = negatives_XR.shape[1]
    most = int(groups.set_offsets_G1.diff().max()) * per_set if groups.count else 0
    columns_N = torch.arange(most, device=hidden_TD.device)
    flat_E = negatives_XR.reshape(-1)

    def piece(
        h_TD: torch.Tensor,
        t_TD: torch.Tensor,
        s_T: torch.Tensor,
        group_T: torch.Tensor,
        tq_T: torch.Tensor | None,
    ) -> torch.Tensor:
        begin_T, end_T = (
            groups.set_offsets_G1[group_T] * per_set,
            groups.set_offsets_G1[group_T + 1] * per_set,
        )
        entry_TN = begin_T.unsqueeze(1) + columns_N
        absent_TN = entry_TN >= end_T.unsqueeze(1)
        entry_TN = entry_TN.masked_fill(absent_TN, 0)
        index_TN = flat_E[entry_TN]
        target_T1 = (h_TD * t_TD).sum(dim=1, keepdim=True) / temperature
        negative_TN = torch.einsum("td,tnd->tn", h_TD, rows_UD[index_TN]) / temperature
        target_T1 = target_T1 if tq_T is None else target_T1 - tq_T.unsqueeze(1)
        negative_TN = (
            negative_TN
            if negative_log_q_XR is None
            else negative_TN - negative_log_q_XR.reshape(-1)[entry_TN]
        )
        return target_loss(target_T1, negative_TN, absent_TN | (index_TN == s_T.unsqueeze(1)))

    if most == 0:
        return (hidden_TD[:, :0] * targets_TD[:, :0]).sum(1) + rows_UD[:0].sum()
    values_per_token = (most + 1) * max(hidden_TD.shape[1], 1)
    return sliced(
        piece,
        len(hidden_TD),
        values_per_token,
        hidden_TD,
        targets_TD,
        same_T,
        groups.of_tokens(),
        target_log_q_T,
    )


def block_of(groups: Groups) -> int:
    """Here every token's weights lie on their own."""
    return 1


def score(
    question: GroupedSoftmaxInputs,
    *,
    block: int = 1,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Scored]:
    """loss_T and what the gradients need; `weights` is where to put them."""
    if block != 1:
        raise ValueError(
            f"the plain score keeps every token's weights on their own, not blocks of {block}"
        )
    hidden_TD, targets_TD, same_T, rows_UD = (
        question.hidden_TD,
        question.targets_TD,
        question.same_T,
        question.rows_UD,
    )
    negatives_XR, groups, temperature = question.negatives_XR, question.groups, question.temperature
    target_log_q_T, negative_log_q_XR = question.target_log_q_T, question.negative_log_q_XR
    per_set = negatives_XR.shape[1]
    places_G1 = weight_places(groups, per_set, 1)
    weights = hidden_TD.new_empty(int(places_G1[-1])) if weights is None else weights
    loss_T, unit_TD = hidden_TD.new_zeros(len(hidden_TD)), torch.zeros_like(hidden_TD)
    target_weights_T = torch.zeros_like(loss_T)
    for g in range(groups.count):
        tokens, sets = (
            slice(*offsets[g : g + 2].tolist())
            for offsets in (groups.offsets_G1, groups.set_offsets_G1)
        )
        index_N, hidden_MD = negatives_XR[sets].reshape(-1), hidden_TD[tokens]
        target_M = (hidden_MD * targets_TD[tokens]).sum(1) / temperature
        target_M = target_M if target_log_q_T is None else target_M - target_log_q_T[tokens]
        logits_MN = hidden_MD @ rows_UD[index_N].T / temperature
        logits_MN = (
            logits_MN
            if negative_log_q_XR is None
            else logits_MN - negative_log_q_XR[sets].reshape(-1)
        )
        logits_MN = logits_MN.masked_fill(index_N == same_T[tokens].unsqueeze(1), float("-inf"))
        total_M = torch.logsumexp(torch.cat([target_M.unsqueeze(1), logits_MN], dim=1), dim=1)
        weights_MN = (logits_MN - total_M.unsqueeze(1)).exp() / temperature
        loss_T[tokens], target_weights_T[tokens] = total_M - target_M, -weights_MN.sum(1)
        unit_TD[tokens] = (
            weights_MN @ rows_UD[index_N]
            + target_weights_T[tokens].unsqueeze(1) * targets_TD[tokens]
        )
        weights[places_G1[g] : places_G1[g + 1]] = weights_MN.reshape(-1)
    return loss_T, Scored(groups, per_set, 1, places_G1, weights, target_weights_T, unit_TD)


def deal(keys_E: torch.Tensor, below: int, buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order_E int32, starts int64 [buckets + 1]): the entries in buckets of neighbouring keys,
    order kept within.
    """
    bucket_E = torch.div(keys_E.reshape(-1) * buckets, below, rounding_mode="floor")
    counts = torch.bincount(bucket_E, minlength=buckets)
    return bucket_E.argsort(stable=True).to(torch.int32), torch.nn.functional.pad(
        counts.cumsum(0), (1, 0)
    )


def add_dealt(
    out_UD: torch.Tensor,
    source_TD: torch.Tensor,
    scored: Scored,
    group_of_set_X: torch.Tensor,
    order_E: torch.Tensor,
    starts: torch.Tensor,
    buckets: tuple[int, int],
    rows: torch.Tensor,
    *,
    by_position: bool,
) -> None:
    """Add the gradient of the negatives in some buckets into `out_UD`, at rows[entry] or
    (by_position) rows[place in the order].
    """
    groups = scored.groups
    begin, end = (int(starts[bucket]) for bucket in buckets)
    step = max(1, VALUES_PER_SLICE // max(1, groups.largest * out_UD.shape[1]))
    for first in range(begin, end, step):
        last = min(first + step, end)
        entry_E = order_E[first:last].to(torch.int64)
        row_E = rows[first - begin : last - begin] if by_position else rows.reshape(-1)[entry_E]
        group_E = group_of_set_X[entry_E // scored.per_set].to(torch.int64)
        members_E = groups.offsets_G1.diff()[group_E]
        which_P = torch.arange(len(entry_E)).repeat_interleave(members_E)
        member_P = torch.arange(len(which_P)) - (members_E.cumsum(0) - members_E)[which_P]
        group_P = group_E[which_P]
        negatives_P = groups.set_offsets_G1.diff()[group_P] * scored.per_set
        column_P = entry_E[which_P] - groups.set_offsets_G1[group_P] * scored.per_set
        weights_P = scored.weights[scored.places_G1[group_P] + member_P * negatives_P + column_P]
        out_UD.index_add_(
            0,
            row_E[which_P],
            weights_P.unsqueeze(1) * source_TD[groups.offsets_G1[group_P] + member_P],
        )
