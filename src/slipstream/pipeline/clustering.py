"""Key-centric clustering: cut a batch so that the samples of a micro-batch share keys.

Rows are exchanged once per micro-batch, so a key that several micro-batches use travels several
times. `key_inflation` counts it: the unique keys summed over the micro-batches, divided by the
unique keys of the batch; 1 is ideal. Samples are dealt out by length first, then annealed
(`ops.sample_clustering`) within limits of tokens per part. The work is bounded by a number of key
visits that grows with the batch, not by the clock, so the same batch is always cut the same way.

Parts need not be equal: only the first part's rows and the last part's gradients travel while
nothing computes, so `window_shares` makes these two smaller. Touch this to cut batches otherwise.
"""

from itertools import pairwise

import numpy as np
import torch

from slipstream.ops import native
from slipstream.ops.rows import unique_keys
from slipstream.ops.sample_clustering import assign_samples

# a part holds at most this times its share of the tokens (or one sample), and at least so much less
SLACK = 1.08
TAPER = 0.5  # size of the first and the last part, relative to the others
# key visits of the annealing per token of the batch; without native code it has time for few
VISITS = 128
_VISITS_SLOWLY = 4


def window_shares(micro_batches: int, taper: float = TAPER) -> np.ndarray:
    """Return each part's share of the tokens; with four parts or more, the ends are smaller."""
    shares_M = np.ones(micro_batches)
    if micro_batches >= 4:
        shares_M[[0, -1]] = taper
    shares_M /= shares_M.sum()
    return shares_M


def key_inflation(
    keys_T: torch.Tensor, offsets_B1: torch.Tensor, parts: list[torch.Tensor]
) -> float:
    """Return the unique keys summed over the parts, divided by the unique keys of the batch."""
    places_B = [slice(int(a), int(b)) for a, b in pairwise(offsets_B1.tolist())]
    chosen = [
        torch.unique(torch.cat([keys_T[:0], *(keys_T[places_B[int(user)]] for user in part)]))
        for part in parts
    ]
    together = int(torch.unique(torch.cat(chosen)).numel())
    return sum(int(keys.numel()) for keys in chosen) / max(together, 1)


def cluster_samples(
    keys_T: torch.Tensor,
    offsets_B1: torch.Tensor,
    micro_batches: int,
    taper: float = TAPER,
    visits: int | None = None,
) -> list[torch.Tensor]:
    """Cut samples into `micro_batches` ascending lists that share keys; lists may be empty."""
    lengths_B = offsets_B1.diff().numpy()
    if micro_batches == 1 or len(lengths_B) <= micro_batches:
        return list(torch.arange(len(lengths_B)).tensor_split(micro_batches))
    share_M = lengths_B.sum() * window_shares(micro_batches, taper)
    high_M = torch.from_numpy(np.maximum(SLACK * share_M, lengths_B.max()).astype(np.int64))
    low_M = torch.from_numpy(np.ceil((2 - SLACK) * share_M).astype(np.int64))
    unique_U, places_T = unique_keys(keys_T)
    budget = keys_T.numel() * (visits or (VISITS if native.available() else _VISITS_SLOWLY))
    first_B = torch.from_numpy(_deal(lengths_B, share_M))
    parts_B = assign_samples(places_T, offsets_B1, unique_U.numel(), first_B, low_M, high_M, budget)
    return _as_lists(parts_B, micro_batches)


def deal_samples(
    offsets_B1: torch.Tensor, micro_batches: int, taper: float = TAPER
) -> list[torch.Tensor]:
    """Cut samples into parts of the same sizes by length alone."""
    lengths_B = offsets_B1.diff().numpy()
    return _as_lists(
        torch.from_numpy(_deal(lengths_B, lengths_B.sum() * window_shares(micro_batches, taper))),
        micro_batches,
    )


def _as_lists(parts_B: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [(parts_B == part).nonzero().squeeze(1) for part in range(parts)]


def _deal(lengths_B: np.ndarray, share_M: np.ndarray) -> np.ndarray:
    """Give each sample, longest first, to the part that has the most room left for its share."""
    parts_B, tokens, shares = (
        np.zeros(len(lengths_B), dtype=np.int64),
        [0.0] * len(share_M),
        np.maximum(share_M, 1e-9).tolist(),
    )
    for sample in np.argsort(-lengths_B, kind="stable").tolist():
        length = float(lengths_B[sample])
        part = min(range(len(shares)), key=lambda each: (tokens[each] + length) / shares[each])
        parts_B[sample] = part
        tokens[part] += length
    return parts_B
