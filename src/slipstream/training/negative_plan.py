"""Which negatives each token of a step competes with, and which tokens share them.

Sharing (`loss.share` = k): the tokens of a sequence, or of the whole batch, are put in an order
that follows from (seed, step, token names) and cut into groups of k (the last group of a segment
may be smaller). Within a sequence this depends on nothing but the sequence, so any cut of a batch
into whole sequences leaves the objective alone; over the batch it depends on the other samples.
Touch this when tokens share negatives in another way.
"""

from dataclasses import dataclass

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.ops.counter_random import derive_seed, random_bits
from slipstream.ops.grouped_types import TokenGroups
from slipstream.training.negatives import UniformNegatives
from slipstream.training.objective import RETRIEVAL_LOSSES
from slipstream.training.recipe_sections import LossConfig

_ORDER = 1  # purpose of a seed


@dataclass(frozen=True)
class NegativePlan:
    """The supervised tokens in the order the loss takes them, and what they compete with."""

    supervised_S: torch.Tensor
    # Items: [S, R] per token, [X, R] per sequence, [R] per step, None for the whole catalogue.
    negatives: torch.Tensor | None
    groups: TokenGroups | None = None  # None: every token has its own set, or all have one


def plan_negatives(
    config: LossConfig,
    batch: JaggedBatch,
    supervised_S: torch.Tensor,
    seed: int,
    sampler: UniformNegatives,
) -> NegativePlan:
    """Draw this step's negatives for the supervised tokens of a batch."""
    kind, groups = RETRIEVAL_LOSSES[config.kind].negatives, None
    if kind == "catalogue":
        return NegativePlan(supervised_S, None)
    # In the order of the batch, whatever order the loss takes.
    targets_S = batch.global_targets_P
    if targets_S is None:
        targets_S = batch.next_items_T[supervised_S]
    if kind == "shared":
        one_name = torch.zeros(1, dtype=torch.int64)
        return NegativePlan(
            supervised_S, sampler.draw(seed, one_name, config.negatives, targets_S)[0]
        )
    sequences_S = torch.arange(batch.num_users).repeat_interleave(batch.lengths_B)[supervised_S]
    token_ids_T = batch.token_ids_T
    if kind == "per_sequence":
        used_X, tokens_X = sequences_S.unique_consecutive(return_counts=True)
        names = token_ids_T[batch.offsets_B1[used_X]]
        groups = TokenGroups(_offsets(tokens_X), torch.arange(used_X.numel() + 1))
    else:
        if config.share > 1:
            segments_S = (
                sequences_S if config.share_within == "sequence" else torch.zeros_like(sequences_S)
            )
            order_S, offsets_G1 = share_groups(
                derive_seed(seed, _ORDER), token_ids_T[supervised_S], segments_S, config.share
            )
            supervised_S, groups = supervised_S[order_S], TokenGroups(offsets_G1, offsets_G1)
        names = token_ids_T[supervised_S]
    return NegativePlan(
        supervised_S, sampler.draw(seed, names, config.negatives, targets_S), groups
    )


def share_groups(
    seed: int, names_S: torch.Tensor, segments_S: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (order_S, offsets_G1): a segment's tokens in a seeded order, cut into groups of k.

    Segments are ascending numbers.
    """
    drawn_S = random_bits(seed, names_S, 1).squeeze(1)
    order_S = drawn_S.argsort(stable=True)
    order_S = order_S[segments_S[order_S].argsort(stable=True)]
    _, sizes_G = segments_S.unique_consecutive(return_counts=True)
    groups_G = (sizes_G + (k - 1)) // k
    last_G = sizes_G - (groups_G - 1) * k
    members = torch.full((int(groups_G.sum()),), k, dtype=torch.int64)
    members[groups_G.cumsum(0) - 1] = last_G
    return order_S, _offsets(members)


def _offsets(sizes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def mixed_by(config: LossConfig) -> str | None:
    """Return the recipe key through which samples of a batch depend on each other, or None."""
    if config.share > 1 and config.share_within == "batch":
        return "loss.share_within=batch"
    return None
