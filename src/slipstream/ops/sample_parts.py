"""Cuts a batch into parts whose samples share keys: annealing over moves and swaps of samples,
within limits of tokens per part.

The cost of a cut is the number of distinct keys summed over its parts. A sample and a part are
drawn; the sample moves there, or changes places with one of that part where tokens do not allow a
move, if that saves keys or (less and less often) although it does not. Work is counted in key
visits, never by the clock, and all of it is integer arithmetic: the same batch is always cut the
same way, by both back-ends.
"""

from itertools import pairwise

import torch

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel

_STAGES, _COLD = 40, 8  # the last ones only go downhill
_MASK = (1 << 64) - 1


def share_keys(
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
    """int64 [B]: each sample's part, from the cut `first_B` on, after about `budget` key visits.
    All tensors are int64.

    A part that begins between `low_M` and `high_M` tokens stays there; one that does not never gets
    further away.
    """
    _check(places_T, offsets_B1, num_keys, first_B, low_M, high_M)
    if backend not in (None, "reference", "native"):
        raise ValueError(f"samples are cut by back-end reference or native, not '{backend}'")
    parts_B = first_B.clone()
    if backend == "reference" or (backend is None and not native.available()):
        _Cut(places_T.tolist(), offsets_B1.tolist(), parts_B.tolist(), low_M.numel()).anneal(
            low_M.tolist(), high_M.tolist(), budget, parts_B
        )
        return parts_B
    tensors = [each.contiguous() for each in (places_T, offsets_B1, low_M, high_M)]
    cut = kernel("ss_share_keys", "ppnnnppnp")
    cut(
        tensors[0],
        tensors[1],
        parts_B.numel(),
        num_keys,
        low_M.numel(),
        tensors[2],
        tensors[3],
        budget,
        parts_B,
    )
    return parts_B


class _Cut:
    """The reference: the same draws and decisions in plain Python."""

    def __init__(
        self, places: list[int], offsets: list[int], part_of: list[int], parts: int
    ) -> None:
        self.part_of, self.random = part_of, 0x5BD1E9955BD1E995
        self.lengths = [end - begin for begin, end in pairwise(offsets)]
        distinct = [dict.fromkeys(places[begin:end]) for begin, end in pairwise(offsets)]
        holders: dict[int, int] = {}
        for keys in distinct:
            for key in keys:
                holders[key] = holders.get(key, 0) + 1
        self.keys = [[key for key in keys if holders[key] > 1] for keys in distinct]
        self.counts = {key: [0] * parts for key, number in holders.items() if number > 1}
        self.tokens = [0] * parts
        for sample, part in enumerate(part_of):
            self.tokens[part] += self.lengths[sample]
            for key in self.keys[sample]:
                self.counts[key][part] += 1

    def draw(self) -> int:
        self.random = (self.random + 0x9E3779B97F4A7C15) & _MASK
        z = self.random
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def change(self, sample: int, start: int, to: int) -> int:
        rows = (self.counts[key] for key in self.keys[sample])
        return sum((row[to] == 0) - (row[start] == 1) for row in rows)

    def go(self, sample: int, start: int, to: int) -> None:
        for key in self.keys[sample]:
            self.counts[key][start] -= 1
            self.counts[key][to] += 1
        self.tokens[start] -= self.lengths[sample]
        self.tokens[to] += self.lengths[sample]
        self.part_of[sample] = to

    def accepts(self, change: int, heat: int) -> bool:
        if change <= 0 or heat == 0:
            return change <= 0
        return change * 256 <= heat * (64 - self.draw().bit_length())

    def anneal(self, low: list[int], high: list[int], budget: int, result_B: torch.Tensor) -> None:
        """Improve the cut and write it into `result_B`."""
        tokens, samples, parts = self.tokens, len(self.part_of), len(low)
        visits = sum(map(len, self.keys))
        heat, spent, stage = max(4 * 256, 16 * visits // max(samples, 1)), 0, 0
        while visits and parts > 1 and spent < budget:
            while stage < spent * _STAGES // budget:
                stage += 1
                heat = heat * 230 // 256 if stage < _STAGES - _COLD else 0
            bits = self.draw()
            one, to = (bits >> 32) * samples >> 32, (bits & 0xFFFFFFFF) * parts >> 32
            start, spent = self.part_of[one], spent + 1
            if to != start:
                spent += self._propose(one, start, to, low, high, tokens, heat)
        result_B.copy_(torch.tensor(self.part_of, dtype=torch.int64))

    def _propose(
        self,
        one: int,
        start: int,
        to: int,
        low: list[int],
        high: list[int],
        tokens: list[int],
        heat: int,
    ) -> int:
        """Move or swap where that is allowed and accepted; returns the keys visited."""
        length = self.lengths[one]
        if tokens[to] + length <= high[to] and tokens[start] - length >= low[start]:
            change = 0 if tokens[start] > high[start] else self.change(one, start, to)
            if self.accepts(change, heat):
                self.go(one, start, to)
            return len(self.keys[one])
        two = (self.draw() >> 32) * len(self.part_of) >> 32
        shift = length - self.lengths[two]
        full, empty = tokens[to] + shift, tokens[start] - shift
        if self.part_of[two] != to or (shift > 0 and (full > high[to] or empty < low[start])):
            return 0
        if shift < 0 and (empty > high[start] or full < low[to]):
            return 0
        change = self.change(one, start, to)
        self.go(one, start, to)
        change += self.change(two, to, start)
        if self.accepts(change, heat):
            self.go(two, to, start)
        else:
            self.go(one, to, start)
        return 2 * (len(self.keys[one]) + len(self.keys[two]))


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
