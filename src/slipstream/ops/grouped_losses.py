"""Softmax of token groups: all tokens of a group compete with the same negatives, read once.

A recipe asks for groups in two ways: *sharing*, where k tokens score each other's sets as well as
their own, and *one set per sequence*. Tokens lie group after group, and so do the sets: group g
owns tokens offsets_G1[g] … offsets_G1[g + 1] and the sets set_offsets_G1[g] … set_offsets_G1[g + 1]
of `negatives_XR` (X sets of R). Targets and negatives may lie in different matrices: rows at
another precision, or a segment of them; `same_T` names the negative that is the token's own target.

Touch this when what the grouped softmax computes changes; its operands are in grouped_types.py.
"""

from types import ModuleType

import torch

from slipstream.ops import backend as backends
from slipstream.ops import grouped_losses_native, grouped_losses_reference
from slipstream.ops.grouped_types import (
    GroupedSoftmaxInputs,
    GroupWeights,
    TokenGroups,
    one_token_groups,
    weight_starts,
)

__all__ = [
    "GroupWeights",
    "GroupedSoftmaxInputs",
    "TokenGroups",
    "backend_steps",
    "grouped_softmax_loss",
    "one_token_groups",
    "weight_starts",
]


def backend_steps(example: torch.Tensor, *, backend: str | None = None) -> ModuleType:
    """The back-end for tensors like `example`, for callers that add up the rows' gradient.

    It has `block_size`, `score`, `sort_into_buckets` and `add_bucket_gradients`.
    """
    native = backends.choose(backend, example) == "native"
    return grouped_losses_native if native else grouped_losses_reference


def grouped_softmax_loss(
    inputs: GroupedSoftmaxInputs, *, backend: str | None = None
) -> torch.Tensor:
    """-log softmax of each token's target among itself and its group's other negatives, [T]."""
    inputs.check()
    steps = backend_steps(inputs.hidden_TD, backend=backend)
    loss_T: torch.Tensor = steps.grouped_softmax_loss(inputs.without_log_q_gradients())
    return loss_T
