"""Key-centric clustering: cut a batch so that the samples of a micro-batch share keys.

Rows are exchanged once per micro-batch, so a key that several micro-batches use travels several times. `key_inflation` counts it:
the unique keys summed over the micro-batches, divided by the unique keys of the batch; 1 is ideal. Two first cuts are made, one by
filling part after part with the samples closest to what it holds, one by dealing samples out by length; in both, samples move one
by one where that saves keys, and the better cut is kept. A limit of tokens per part holds throughout. The work is bounded by a
number of sweeps, not by the clock, so the same batch is always cut the same way.

Parts need not be equal: only the first part's rows and the last part's gradients travel while nothing computes, so `window_shares`
makes these two smaller.
"""

from itertools import pairwise

import numpy as np
import torch

SLACK = 1.08  # a part holds at most this times its share of the tokens (or one sample)
TAPER = 0.5  # size of the first and the last part, beside the others
_COLUMNS = 4096  # keys are folded into so many columns where a batch has more
_SWEEPS = 4


def window_shares(micro_batches: int, taper: float = TAPER) -> np.ndarray:
    """Each part's share of the tokens: a smaller first and last part where there are at least four."""
    shares_M = np.ones(micro_batches)
    if micro_batches >= 4:
        shares_M[[0, -1]] = taper
    return shares_M / shares_M.sum()


def key_inflation(keys_T: torch.Tensor, offsets_B1: torch.Tensor, parts: list[torch.Tensor]) -> float:
    """Unique keys summed over the parts, over the unique keys of all of them."""
    places_B = [slice(int(a), int(b)) for a, b in pairwise(offsets_B1.tolist())]
    chosen = [torch.cat([keys_T[:0], *(keys_T[places_B[int(user)]] for user in part)]).unique() for part in parts]
    return sum(keys.numel() for keys in chosen) / max(torch.cat(chosen).unique().numel(), 1)


def cluster_samples(keys_T: torch.Tensor, offsets_B1: torch.Tensor, micro_batches: int, taper: float = TAPER) -> list[torch.Tensor]:
    """`micro_batches` lists of samples (each ascending, perhaps empty) that together hold every sample once."""
    lengths_B = offsets_B1.diff().numpy()
    if micro_batches == 1 or len(lengths_B) <= micro_batches:
        return list(torch.arange(len(lengths_B)).tensor_split(micro_batches))
    shared_BK = _shared_keys(keys_T.numpy(), lengths_B)
    limit_M = np.maximum(SLACK * lengths_B.sum() * window_shares(micro_batches, taper), lengths_B.max())
    cuts = [_fill(shared_BK, lengths_B, limit_M), _deal(lengths_B, limit_M)]
    costs = [_improve(shared_BK, lengths_B, parts_B, limit_M) for parts_B in cuts]
    return _as_lists(cuts[int(np.argmin(costs))], micro_batches)


def deal_samples(offsets_B1: torch.Tensor, micro_batches: int, taper: float = TAPER) -> list[torch.Tensor]:
    """Parts of the same sizes by length alone."""
    lengths_B = offsets_B1.diff().numpy()
    return _as_lists(_deal(lengths_B, lengths_B.sum() * window_shares(micro_batches, taper)), micro_batches)


def _as_lists(parts_B: np.ndarray, parts: int) -> list[torch.Tensor]:
    return [torch.from_numpy(np.flatnonzero(parts_B == part)) for part in range(parts)]


def _shared_keys(keys_T: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """float32 [B, K]: which sample has which of the keys that more than one sample has; the others cost the same everywhere."""
    samples_T = np.repeat(np.arange(len(lengths_B)), lengths_B)
    unique_K, place_T = np.unique(keys_T, return_inverse=True)
    pairs_P = np.unique(place_T * len(lengths_B) + samples_T)
    place_P, sample_P = np.divmod(pairs_P, len(lengths_B))
    holders_K = np.bincount(place_P, minlength=len(unique_K))
    column_K = np.cumsum(holders_K > 1) - 1
    kept_P = holders_K[place_P] > 1
    columns = max(1, min(int(column_K[-1]) + 1 if len(column_K) else 0, _COLUMNS))
    shared_BK = np.zeros((len(lengths_B), columns), dtype=np.float32)
    shared_BK[sample_P[kept_P], column_K[place_P[kept_P]] % columns] = 1.0
    return shared_BK


def _fill(shared_BK: np.ndarray, lengths_B: np.ndarray, limit_M: np.ndarray) -> np.ndarray:
    """Part after part: begin with the longest sample left, then always the one that has most in common with those inside."""
    parts_B, left_B = np.full(len(lengths_B), len(limit_M) - 1), np.ones(len(lengths_B), dtype=bool)
    sizes_B = np.maximum(shared_BK.sum(1), 1.0)
    # A key that few samples have says more about them than one that all have.
    common_BB = (shared_BK / np.maximum(shared_BK.sum(0), 1.0)) @ shared_BK.T / sizes_B
    for part, limit in enumerate(limit_M[:-1] / SLACK):
        score_B, tokens = 1e-6 * lengths_B / max(lengths_B.max(), 1), 0.0
        while True:
            fits_B = left_B & (tokens + lengths_B <= max(limit, lengths_B.max() if tokens == 0 else 0.0))
            if not fits_B.any():
                break
            sample = int(np.where(fits_B, score_B, -1.0).argmax())
            parts_B[sample], left_B[sample] = part, False
            score_B = score_B + common_BB[sample]
            tokens += lengths_B[sample]
    return parts_B


def _deal(lengths_B: np.ndarray, limit_M: np.ndarray) -> np.ndarray:
    """The longest samples first, each to the part with the most room for it."""
    parts_B, tokens_M = np.empty(len(lengths_B), dtype=np.int64), np.zeros(len(limit_M))
    for sample in np.argsort(-lengths_B, kind="stable"):
        part = int(((tokens_M + lengths_B[sample]) / limit_M).argmin())
        parts_B[sample] = part
        tokens_M[part] += lengths_B[sample]
    return parts_B


def _improve(shared_BK: np.ndarray, lengths_B: np.ndarray, parts_B: np.ndarray, limit_M: np.ndarray) -> float:
    """Move samples, in place, where that saves keys or relieves a part that is too full; returns the shared keys of all parts."""
    parts = len(limit_M)
    counts_MK = np.zeros((parts, shared_BK.shape[1]), dtype=np.float32)
    np.add.at(counts_MK, parts_B, shared_BK)
    held_MK, single_MK = (counts_MK > 0).astype(np.float32), (counts_MK == 1).astype(np.float32)
    tokens_M = np.bincount(parts_B, weights=lengths_B, minlength=parts)
    sizes_B = shared_BK.sum(1)
    for _ in range(_SWEEPS):
        moved = 0
        for sample, row_K in enumerate(shared_BK):
            here = parts_B[sample]
            change_M = sizes_B[sample] - held_MK @ row_K - single_MK[here] @ row_K
            change_M[tokens_M + lengths_B[sample] > limit_M] = np.inf
            change_M[here] = 0.0 if tokens_M[here] <= limit_M[here] else np.inf
            there = int(change_M.argmin())
            if there == here or not np.isfinite(change_M[there]):
                continue
            for part, sign in ((here, -1), (there, 1)):
                counts_MK[part] += sign * row_K
                held_MK[part], single_MK[part] = counts_MK[part] > 0, counts_MK[part] == 1
                tokens_M[part] += sign * lengths_B[sample]
            parts_B[sample] = there
            moved += 1
        if moved == 0:
            break
    return float(held_MK.sum()) + 1e9 * float((tokens_M > limit_M).sum())
