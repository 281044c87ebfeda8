"""What the grouped softmax receives and keeps: groups of tokens, its operands, its weights.

Touch this when the grouped softmax of grouped_losses.py gets another operand. The weights are a
record of their own because a segmented fetch of rows adds up the rows' gradient later.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slipstream.ops import operand_checks


@dataclass(frozen=True)
class TokenGroups:
    """Which tokens share which sets of negatives.

    Group g owns tokens offsets_G1[g] … offsets_G1[g + 1] - 1 and the sets
    set_offsets_G1[g] … set_offsets_G1[g + 1] - 1.
    """

    offsets_G1: torch.Tensor
    set_offsets_G1: torch.Tensor

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.offsets_G1.numel() - 1

    @property
    def largest(self) -> int:
        """Tokens of the largest group."""
        return int(self.offsets_G1.diff().max()) if self.count else 0

    def of_tokens(self) -> torch.Tensor:
        """The group of each token."""
        return self._repeat(self.offsets_G1)

    def of_sets(self) -> torch.Tensor:
        """The group of each set."""
        return self._repeat(self.set_offsets_G1)

    def _repeat(self, offsets_G1: torch.Tensor) -> torch.Tensor:
        groups_G = torch.arange(self.count, device=offsets_G1.device)
        return groups_G.repeat_interleave(offsets_G1.diff())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenGroups":
        """The same groups with `function` applied to both lists, for example a device copy."""
        return TokenGroups(function(self.offsets_G1), function(self.set_offsets_G1))

    def take(self, first: int, last: int) -> "TokenGroups":
        """Groups first … last - 1, their tokens and sets counted from 0."""
        offsets, sets = self.offsets_G1[first : last + 1], self.set_offsets_G1[first : last + 1]
        return TokenGroups(offsets - offsets[0], sets - sets[0])

    def check(self, tokens: int, sets: int) -> None:
        """Refuse offsets that do not rise from 0 to the number of tokens and of sets."""
        for name, offsets, end in (
            ("groups", self.offsets_G1, tokens),
            ("sets", self.set_offsets_G1, sets),
        ):
            if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() < 1:
                raise TypeError(
                    f"offsets of {name} must be a list of int64, got {offsets.dtype} of "
                    f"{offsets.dim()} dimensions"
                )
            if int(offsets[0]) != 0 or int(offsets[-1]) != end or bool((offsets.diff() < 0).any()):
                raise ValueError(f"offsets of {name} must rise from 0 to {end}")
        if self.offsets_G1.shape != self.set_offsets_G1.shape:
            raise ValueError("tokens and sets must have the same number of groups")


def one_token_groups(tokens: int, device: torch.device | None = None) -> TokenGroups:
    """Groups of one token each, every token with its own set."""
    offsets = torch.arange(tokens + 1, device=device)
    return TokenGroups(offsets, offsets)


@dataclass(frozen=True)
class GroupedSoftmaxInputs:
    """The operands of `grouped_softmax_loss`; gradients reach hidden_TD, targets_TD and rows_UD."""

    hidden_TD: torch.Tensor
    targets_TD: torch.Tensor  # the row of each token's target
    same_T: torch.Tensor  # index into rows_UD of the token's target, -1 where it is not among them
    rows_UD: torch.Tensor
    negatives_XR: torch.Tensor  # indices into rows_UD
    groups: TokenGroups
    temperature: float = 1.0
    target_log_q_T: torch.Tensor | None = None
    negative_log_q_XR: torch.Tensor | None = None

    def check(self) -> None:
        """Refuse operands that do not fit, with an exception that names the operand."""
        operand_checks.floating("hidden", self.hidden_TD, dims=2)
        tokens, width = self.hidden_TD.shape
        rows, device = self.rows_UD.shape[0], self.hidden_TD.device
        operand_checks.like("targets", self.targets_TD, "hidden", self.hidden_TD, (tokens, width))
        operand_checks.like("rows", self.rows_UD, "hidden", self.hidden_TD, (rows, width))
        operand_checks.integers("same", self.same_T, shape=(tokens,), device=device)
        operand_checks.index(
            "negatives", self.negatives_XR, rows, shape=(None, None), device=device
        )
        operand_checks.positive("temperature", self.temperature)
        if self.target_log_q_T is not None:
            operand_checks.like(
                "target_log_q", self.target_log_q_T, "hidden", self.hidden_TD, (tokens,)
            )
        if self.negative_log_q_XR is not None:
            shape = tuple(self.negatives_XR.shape)
            operand_checks.like(
                "negative_log_q", self.negative_log_q_XR, "hidden", self.hidden_TD, shape
            )
        self.groups.check(tokens, self.negatives_XR.shape[0])

    def without_log_q_gradients(self) -> "GroupedSoftmaxInputs":
        """The same operands; no gradient reaches the probabilities of being drawn."""
        target, negative = (
            None if log_q is None else log_q.detach()
            for log_q in (self.target_log_q_T, self.negative_log_q_XR)
        )
        return replace(self, target_log_q_T=target, negative_log_q_XR=negative)


@dataclass(frozen=True)
class GroupWeights:
    """Softmax weights (d loss / d logit / temperature) of all groups: what the gradients need.

    One weight per (token, negative), never tokens x negatives x width.
    """

    groups: TokenGroups
    per_set: int
    block: int  # tokens whose weights for one negative lie side by side
    starts_G1: torch.Tensor  # where each group's weights begin
    weights: torch.Tensor  # [block of tokens][negative][block], group after group
    target_weights_T: torch.Tensor
    unit_TD: torch.Tensor  # gradient of hidden for a unit loss gradient


def weight_starts(groups: TokenGroups, per_set: int, block: int) -> torch.Tensor:
    """[G + 1]: where the weights of each group begin, and their number."""
    blocks_G = (groups.offsets_G1.diff() + (block - 1)) // block
    sizes_G = blocks_G * block * groups.set_offsets_G1.diff() * per_set
    return torch.nn.functional.pad(sizes_G.cumsum(0), (1, 0))
