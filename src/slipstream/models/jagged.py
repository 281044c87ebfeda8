"""Index arithmetic over jagged tokens: offsets, places, and new tokens behind past ones.

Touch this when a model needs another way to address jagged tokens.
"""

import torch


def offsets_from_lengths(lengths_B: torch.Tensor) -> torch.Tensor:
    """[B + 1] int64 running sum that starts with 0."""
    return torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))


def sequence_and_place(offsets_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of every token and its place in it, both int64 [T]."""
    lengths_B = offsets_B1.diff()
    sequence_T = torch.arange(lengths_B.numel(), device=offsets_B1.device).repeat_interleave(
        lengths_B
    )
    place_T = torch.arange(sequence_T.numel(), device=offsets_B1.device) - offsets_B1[sequence_T]
    return sequence_T, place_T


def join_order(
    past_offsets_B1: torch.Tensor, new_offsets_B1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and order of each sequence's past tokens followed by its new ones.

    The order gives, for every joined token, its row in `torch.cat([past, new])`.
    """
    joined_offsets_B1 = past_offsets_B1 + new_offsets_B1
    sequence_S, place_S = sequence_and_place(joined_offsets_B1)
    past_length_S = past_offsets_B1.diff()[sequence_S]
    from_past_S = past_offsets_B1[sequence_S] + place_S
    from_new_S = past_offsets_B1[-1] + new_offsets_B1[sequence_S] + place_S - past_length_S
    return joined_offsets_B1, torch.where(place_S < past_length_S, from_past_S, from_new_S)


def leading_tokens(offsets_B1: torch.Tensor, keep_B: torch.Tensor) -> torch.Tensor:
    """Rows of the first `keep_B[b]` tokens of every sequence, in order."""
    sequence_T, place_T = sequence_and_place(offsets_B1)
    return torch.nonzero(place_T < keep_B[sequence_T]).squeeze(1)


def trailing_tokens(offsets_B1: torch.Tensor, keep_B: torch.Tensor) -> torch.Tensor:
    """Rows of the last `keep_B[b]` tokens of every sequence, in order."""
    sequence_T, place_T = sequence_and_place(offsets_B1)
    first_B = offsets_B1.diff() - keep_B
    return torch.nonzero(place_T >= first_B[sequence_T]).squeeze(1)


def take_segments(
    values_V: torch.Tensor, offsets_N1: torch.Tensor, rows_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of some rows of a jagged column, end to end, and the offsets of these [T + 1]."""
    starts_T = offsets_N1[rows_T]
    offsets_T1 = offsets_from_lengths(offsets_N1[rows_T + 1] - starts_T)
    segment_S, place_S = sequence_and_place(offsets_T1)
    return values_V[starts_T[segment_S] + place_S], offsets_T1


def segment_mean(x_SD: torch.Tensor, offsets_T1: torch.Tensor) -> torch.Tensor:
    """[T, D]: the mean of each segment's rows; no segment may be empty."""
    lengths_T = offsets_T1.diff()
    segment_S = torch.arange(lengths_T.numel(), device=lengths_T.device).repeat_interleave(
        lengths_T
    )
    sums_TD = x_SD.new_zeros(lengths_T.numel(), x_SD.shape[1]).index_add(0, segment_S, x_SD)
    return sums_TD / lengths_T.unsqueeze(1)
