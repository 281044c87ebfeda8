"""Divides a batch into parts whose samples share keys, within limits of tokens per part.

The cost of a division is the number of distinct keys, summed over its parts. Simulated annealing
lowers it: a sample and a part are drawn; the sample goes to that part, or changes places with a
sample of it where the token limits allow no more, if that saves keys or (less and less often) even
if it does not. Work is counted in key visits, never by the clock, and all of it is integer
arithmetic: the same batch is always divided the same way, by both back-ends. Touch this when
another division is wanted; pipeline/clustering.py decides how much work it is worth.
"""

import torch

from slipstream.ops import native, sample_clustering_reference
from slipstream.ops.kernel_call import kernel


def assign_samples(
    places_T: torch.Tensor,
    offsets_B1: torch.Tensor,
    num_keys: int,
    first_B: torch.Tensor,
    low_M: torch.Tensor,
    high_M: torch.Tensor,
    budget: int,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """int64 [B]: each sample's part, improved from `first_B` by about `budget` key visits.

    `places_T` is the key of each token, 0 … num_keys - 1; all tensors are int64. A part that begins
    with `low_M` to `high_M` tokens keeps to that; another one never gets further away from it.
    """
    _check(places_T, offsets_B1, num_keys, first_B, low_M, high_M)
    if backend not in (None, "reference", "native"):
        raise ValueError(f"samples are clustered by back-end reference or native, not '{backend}'")
    if backend == "reference" or (backend is None and not native.available()):
        parts = sample_clustering_reference.assign_samples(
            places_T.tolist(), offsets_B1.tolist(), first_B.tolist(), low_M.tolist(),
            high_M.tolist(), budget,
        )  # fmt: skip
        return torch.tensor(parts, dtype=torch.int64)
    places_T, offsets_B1 = places_T.contiguous(), offsets_B1.contiguous()
    low_M, high_M, parts_B = low_M.contiguous(), high_M.contiguous(), first_B.clone()
    kernel("ss_assign_samples")(
        places_T, offsets_B1, parts_B.numel(), num_keys, low_M.numel(), low_M, high_M, budget,
        parts_B,
    )  # fmt: skip
    return parts_B


def _check(
    places_T: torch.Tensor,
    offsets_B1: torch.Tensor,
    num_keys: int,
    first_B: torch.Tensor,
    low_M: torch.Tensor,
    high_M: torch.Tensor,
) -> None:
    for name, each in {
        "places": places_T,
        "offsets": offsets_B1,
        "first": first_B,
        "low": low_M,
        "high": high_M,
    }.items():
        if each.dtype != torch.int64 or each.dim() != 1 or each.device.type != "cpu":
            raise TypeError(
                f"{name} must be a list of int64 on the CPU, got {each.dtype} with {each.dim()} "
                "dimensions"
            )
    samples, parts = first_B.numel(), low_M.numel()
    if (
        offsets_B1.numel() != samples + 1
        or int(offsets_B1[0]) != 0
        or int(offsets_B1[-1]) != places_T.numel()
    ):
        raise ValueError(
            "offsets must begin at 0, end at the number of places and have one entry more than "
            "there are samples"
        )
    if (
        parts < 1
        or high_M.numel() != parts
        or samples >= 1 << 31
        or bool((offsets_B1.diff() < 0).any())
    ):
        raise ValueError(
            "there must be a low and a high limit for every part, and offsets must not fall"
        )
    for name, each, end in (("place", places_T, num_keys), ("part", first_B, parts)):
        if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < end:
            raise IndexError(f"a {name} is not between 0 and {end - 1}")
