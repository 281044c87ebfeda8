"""Key-centric clustering: cut a batch so that the samples of a micro-batch share keys.

Rows are exchanged once per micro-batch, so a key that several micro-batches use travels several times. `key_inflation` counts it:
the unique keys summed over the micro-batches, divided by the unique keys of the batch; 1 is ideal. Samples begin dealt out by
length, then move one by one where that saves keys, under a limit of tokens per part. The work is bounded by counted operations, not
by the clock, so the same batch is always cut the same way.
"""

from itertools import pairwise

import numpy as np
import torch

SLACK = 1.08  # a part holds at most this times its share of the tokens (or one sample)
_COLUMNS = 4096  # keys are folded into so many columns where a batch has more
_OPERATIONS = 60_000_000  # multiply-adds spent on moving samples


def key_inflation(keys_T: torch.Tensor, offsets_B1: torch.Tensor, parts: list[torch.Tensor]) -> float:
    """Unique keys summed over the parts, over the unique keys of all of them."""
    places_B = [slice(int(a), int(b)) for a, b in pairwise(offsets_B1.tolist())]
    chosen = [torch.cat([keys_T[:0], *(keys_T[places_B[int(user)]] for user in part)]).unique() for part in parts]
    return sum(keys.numel() for keys in chosen) / max(torch.cat(chosen).unique().numel(), 1)


def cluster_samples(keys_T: torch.Tensor, offsets_B1: torch.Tensor, micro_batches: int) -> list[torch.Tensor]:
    """`micro_batches` lists of samples (each ascending, perhaps empty) that together hold every sample once."""
    lengths_B = offsets_B1.diff().numpy()
    if micro_batches == 1 or len(lengths_B) <= micro_batches:
        return list(torch.arange(len(lengths_B)).tensor_split(micro_batches))
    shared_BK = _shared_keys(keys_T.numpy(), lengths_B)
    parts_B = _deal(lengths_B, micro_batches)
    _improve(shared_BK, lengths_B, parts_B, micro_batches)
    return [torch.from_numpy(np.flatnonzero(parts_B == part)) for part in range(micro_batches)]


def _shared_keys(keys_T: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """float32 [B, K]: which sample has which of the keys that more than one sample has; the others cost the same everywhere."""
    samples_T = np.repeat(np.arange(len(lengths_B)), lengths_B)
    unique_K, place_T = np.unique(keys_T, return_inverse=True)
    pairs_P = np.unique(place_T * len(lengths_B) + samples_T)
    place_P, sample_P = np.divmod(pairs_P, len(lengths_B))
    holders_K = np.bincount(place_P, minlength=len(unique_K))
    column_K = np.cumsum(holders_K > 1) - 1
    kept_P = holders_K[place_P] > 1
    columns = min(int(column_K[-1]) + 1 if len(column_K) else 0, _COLUMNS)
    shared_BK = np.zeros((len(lengths_B), max(columns, 1)), dtype=np.float32)
    shared_BK[sample_P[kept_P], column_K[place_P[kept_P]] % max(columns, 1)] = 1.0
    return shared_BK


def _deal(lengths_B: np.ndarray, parts: int) -> np.ndarray:
    """The longest samples first, to and fro over the parts: token-balanced to begin with."""
    turn_B = np.arange(len(lengths_B)) % (2 * parts)
    parts_B = np.empty(len(lengths_B), dtype=np.int64)
    parts_B[np.argsort(-lengths_B, kind="stable")] = np.minimum(turn_B, 2 * parts - 1 - turn_B)
    return parts_B


def _improve(shared_BK: np.ndarray, lengths_B: np.ndarray, parts_B: np.ndarray, parts: int) -> None:
    """Move single samples where that saves keys, in sweeps, until nothing moves or the operations are spent."""
    limit = max(SLACK * lengths_B.sum() / parts, lengths_B.max())
    counts_MK = np.zeros((parts, shared_BK.shape[1]), dtype=np.float32)
    np.add.at(counts_MK, parts_B, shared_BK)
    tokens_M = np.bincount(parts_B, weights=lengths_B, minlength=parts)
    sweeps = max(1, int(_OPERATIONS // (shared_BK.size * parts * 2)))
    for _ in range(min(sweeps, 12)):
        moved = 0
        for sample in range(len(lengths_B)):
            here, row_K = parts_B[sample], shared_BK[sample]
            own = row_K.sum()
            new_M = own - (counts_MK > 0).astype(np.float32) @ row_K
            saved = float(row_K @ (counts_MK[here] == 1))
            change_M = new_M - saved + 1e9 * (tokens_M + lengths_B[sample] > limit)
            change_M[here] = 0.0
            there = int(change_M.argmin())
            if change_M[there] < 0:
                counts_MK[here] -= row_K
                counts_MK[there] += row_K
                tokens_M[here] -= lengths_B[sample]
                tokens_M[there] += lengths_B[sample]
                parts_B[sample] = there
                moved += 1
        if moved == 0:
            break
