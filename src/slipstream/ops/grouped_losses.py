"""Softmax of token groups: all tokens of a group compete with the same negatives, read once for all
of them.

Two things a recipe can ask for are groups: *sharing*, where k tokens score each other's sets beside
their own, and *one set per sequence*. Tokens come group after group, and so do the sets: group g
owns tokens offsets_G1[g] … offsets_G1[g + 1] and the sets set_offsets_G1[g] … set_offsets_G1[g + 1]
of `negatives_XR` (X sets of R). Targets and negatives may lie in different matrices: rows at
another precision, or a segment of them; `same_T` says which negative is the token's own target.
"""

from types import ModuleType

import torch

from slipstream.ops import backend as backends
from slipstream.ops import grouped_losses_native, grouped_losses_reference
from slipstream.ops.grouped_inputs import GroupedSoftmaxInputs
from slipstream.ops.token_groups import Groups

__all__ = ["GroupedSoftmaxInputs", "Groups", "grouped_softmax_loss", "pieces"]


def pieces(example: torch.Tensor, *, backend: str | None = None) -> ModuleType:
    """The back-end's `score`, `deal`, `add_dealt` and `block_of`, for callers that add the rows'
    gradient up themselves.
    """
    return (
        grouped_losses_native
        if backends.choose(backend, example) == "native"
        else grouped_losses_reference
    )


def grouped_softmax_loss(
    question: GroupedSoftmaxInputs, *, backend: str | None = None
) -> torch.Tensor:
    """-log softmax of each token's target among itself and its group's negatives; those that are
    its target are left out.
    """
    question.check()
    loss_T: torch.Tensor = pieces(question.hidden_TD, backend=backend).grouped_softmax_loss(
        question.with_fixed_chances()
    )
    return loss_T
