"""Which tokens share which sets of negatives: two lists of offsets, tokens and sets both lying
group after group.

`Scored` is what the softmax of groups leaves behind for the rows' gradient: a weight per (token,
negative), never tokens x negatives x width. It is a thing of its own because a segmented fetch adds
the gradient up later, chunk of keys after chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Groups:
    """Group g owns tokens offsets_G1[g] … offsets_G1[g + 1] - 1 and the sets set_offsets_G1[g] …
    set_offsets_G1[g + 1] - 1.
    """

    offsets_G1: torch.Tensor
    set_offsets_G1: torch.Tensor

    @property
    def count(self) -> int:
        return self.offsets_G1.numel() - 1

    @property
    def largest(self) -> int:
        """Tokens of the largest group."""
        return int(self.offsets_G1.diff().max()) if self.count else 0

    def of_tokens(self) -> torch.Tensor:
        """The group of each token."""
        return torch.arange(self.count, device=self.offsets_G1.device).repeat_interleave(
            self.offsets_G1.diff()
        )

    def of_sets(self) -> torch.Tensor:
        """The group of each set."""
        return torch.arange(self.count, device=self.offsets_G1.device).repeat_interleave(
            self.set_offsets_G1.diff()
        )

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Groups":
        """The same groups with both lists moved, to another device say."""
        return Groups(move(self.offsets_G1), move(self.set_offsets_G1))

    def take(self, first: int, last: int) -> "Groups":
        """Groups first … last - 1, their tokens and sets counted from 0."""
        offsets, sets = self.offsets_G1[first : last + 1], self.set_offsets_G1[first : last + 1]
        return Groups(offsets - offsets[0], sets - sets[0])

    def check(self, tokens: int, sets: int) -> None:
        """Both lists of offsets rise from 0 and cover all tokens and all sets."""
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


def singles(tokens: int, device: torch.device | None = None) -> Groups:
    """Every token alone with its own set."""
    offsets = torch.arange(tokens + 1, device=device)
    return Groups(offsets, offsets)


@dataclass(frozen=True)
class Scored:
    """Softmax weights (d loss / d logit / temperature) of all groups, and where each group's begin."""

    groups: Groups
    per_set: int
    block: int  # tokens whose weights for one negative lie side by side
    places_G1: torch.Tensor
    weights: torch.Tensor  # [block of tokens][negative][block], group after group
    target_weights_T: torch.Tensor
    unit_TD: torch.Tensor  # gradient of hidden for a unit loss gradient


def weight_places(groups: Groups, per_set: int, block: int) -> torch.Tensor:
    """[G + 1]: where the weights of each group begin, and their number."""
    blocks_G = (groups.offsets_G1.diff() + (block - 1)) // block
    sizes_G = blocks_G * block * groups.set_offsets_G1.diff() * per_set
    return torch.nn.functional.pad(sizes_G.cumsum(0), (1, 0))
