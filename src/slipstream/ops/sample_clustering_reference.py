"""The clustering of samples in plain Python: the same draws and decisions as the compiled one.

Touch this only together with native/sample_clustering.cpp.
"""

from itertools import pairwise

_STAGES, _COLD = 40, 8  # temperature stages; the last ones accept improvements only
_MASK = (1 << 64) - 1


def assign_samples(
    places: list[int],
    offsets: list[int],
    first: list[int],
    low: list[int],
    high: list[int],
    budget: int,
) -> list[int]:
    """Each sample's part, improved from `first`."""
    division = _Division(places, offsets, first, len(low))
    division.anneal(low, high, budget)
    return division.part_of


class _Division:
    """A division of samples into parts, with the counts that tell what a change costs."""

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
        """The next 64 random bits (splitmix64)."""
        self.random = (self.random + 0x9E3779B97F4A7C15) & _MASK
        z = self.random
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def change(self, sample: int, start: int, to: int) -> int:
        """How many more keys there are if `sample` goes from part `start` to part `to`."""
        rows = (self.counts[key] for key in self.keys[sample])
        return sum((row[to] == 0) - (row[start] == 1) for row in rows)

    def assign(self, sample: int, start: int, to: int) -> None:
        """Take `sample` from part `start` to part `to`."""
        for key in self.keys[sample]:
            self.counts[key][start] -= 1
            self.counts[key][to] += 1
        self.tokens[start] -= self.lengths[sample]
        self.tokens[to] += self.lengths[sample]
        self.part_of[sample] = to

    def accepts(self, change: int, heat: int) -> bool:
        """Whether to accept a change of cost; a higher cost is accepted less often when cold."""
        if change <= 0 or heat == 0:
            return change <= 0
        return change * 256 <= heat * (64 - self.draw().bit_length())

    def anneal(self, low: list[int], high: list[int], budget: int) -> None:
        """Improve the division with about `budget` key visits."""
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
        """Reassign or swap where that is allowed and accepted; returns the keys visited."""
        length = self.lengths[one]
        if tokens[to] + length <= high[to] and tokens[start] - length >= low[start]:
            change = 0 if tokens[start] > high[start] else self.change(one, start, to)
            if self.accepts(change, heat):
                self.assign(one, start, to)
            return len(self.keys[one])
        two = (self.draw() >> 32) * len(self.part_of) >> 32
        shift = length - self.lengths[two]
        full, empty = tokens[to] + shift, tokens[start] - shift
        if self.part_of[two] != to or (shift > 0 and (full > high[to] or empty < low[start])):
            return 0
        if shift < 0 and (empty > high[start] or full < low[to]):
            return 0
        change = self.change(one, start, to)
        self.assign(one, start, to)
        change += self.change(two, to, start)
        if self.accepts(change, heat):
            self.assign(two, to, start)
        else:
            self.assign(one, to, start)
        return 2 * (len(self.keys[one]) + len(self.keys[two]))
