"""Plain PyTorch of the grouped softmax: the oracle of the compiled one. Tokens go through in slices that backward computes again."""

import torch

from slipstream.ops.losses_reference import sliced, target_loss
from slipstream.ops.token_groups import Groups


def grouped_softmax_loss(
    hidden_TD: torch.Tensor,
    targets_TD: torch.Tensor,
    same_T: torch.Tensor,
    rows_UD: torch.Tensor,
    negatives_XR: torch.Tensor,
    groups: Groups,
    temperature: float,
    target_log_q_T: torch.Tensor | None,
    negative_log_q_XR: torch.Tensor | None,
) -> torch.Tensor:
    """Each token against all negatives of its group."""
    per_set = negatives_XR.shape[1]
    most = int(groups.set_offsets_G1.diff().max()) * per_set if groups.count else 0
    columns_N = torch.arange(most)
    flat_E = negatives_XR.reshape(-1)

    def piece(
        h_TD: torch.Tensor, t_TD: torch.Tensor, s_T: torch.Tensor, group_T: torch.Tensor, tq_T: torch.Tensor | None
    ) -> torch.Tensor:
        begin_T, end_T = groups.set_offsets_G1[group_T] * per_set, groups.set_offsets_G1[group_T + 1] * per_set
        entry_TN = begin_T.unsqueeze(1) + columns_N
        absent_TN = entry_TN >= end_T.unsqueeze(1)
        entry_TN = entry_TN.masked_fill(absent_TN, 0)
        index_TN = flat_E[entry_TN]
        target_T1 = (h_TD * t_TD).sum(dim=1, keepdim=True) / temperature
        negative_TN = torch.einsum("td,tnd->tn", h_TD, rows_UD[index_TN]) / temperature
        target_T1 = target_T1 if tq_T is None else target_T1 - tq_T.unsqueeze(1)
        negative_TN = negative_TN if negative_log_q_XR is None else negative_TN - negative_log_q_XR.reshape(-1)[entry_TN]
        return target_loss(target_T1, negative_TN, absent_TN | (index_TN == s_T.unsqueeze(1)))

    if most == 0:
        return (hidden_TD[:, :0] * targets_TD[:, :0]).sum(1) + rows_UD[:0].sum()
    values_per_token = (most + 1) * max(hidden_TD.shape[1], 1)
    return sliced(piece, len(hidden_TD), values_per_token, hidden_TD, targets_TD, same_T, groups.of_tokens(), target_log_q_T)
