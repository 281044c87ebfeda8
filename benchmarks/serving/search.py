"""The largest rate, or the longest history, that a variant holds: search, verdicts, turns.

Rates and lengths lie on a grid of ratio 1.15; a level is a place on it. Our own generator finds
the level at which LoadGen begins; LoadGen's verdicts decide. A search yields the run it needs and
is sent its row, so that the searches of several variants take turns. Touch this when the protocol's
search changes.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from benchmarks.serving.ideal_queue import RelayTimes, inline_rate, relay_rate
from benchmarks.serving.runs import Row, Runner, RunPlan
from benchmarks.serving.server import Variant
from benchmarks.serving.users import Population

STEP = 1.15
LOWEST_RATE = 5.0
BEGIN = 0.8  # of the ideal queue's rate: where a search begins
Found = TypeVar("Found")
Search = Generator[RunPlan, Row, Found]
VERDICTS, NEEDED = 3, 2
TRIES = 2  # a run that does not hold, or is INVALID, is repeated once


def level_of(rate: float) -> int:
    """Return the largest level whose rate is not above `rate`."""
    return math.floor(math.log(rate) / math.log(STEP) + 1e-9)


def rate_of(level: int) -> float:
    """Return the rate of a level."""
    return float(STEP**level)


LOWEST_LEVEL = level_of(LOWEST_RATE) + 1


def take_turns(run: Callable[[RunPlan], Row], searches: Sequence[Search[Found]]) -> list[Found]:
    """Drive searches to their ends, a run of each in turn; return what they found."""
    found: dict[int, Found] = {}
    rows: dict[int, Row | None] = dict.fromkeys(range(len(searches)))
    while rows:
        for place, row in list(rows.items()):
            try:
                plan = searches[place].send(row)  # type: ignore[arg-type]  # None begins
            except StopIteration as end:
                found[place] = end.value
                del rows[place]
            else:
                rows[place] = run(plan)
    return [found[place] for place in range(len(searches))]


def largest_held(
    holds: Callable[[int], Search[bool]], begin: int, low: int, high: int
) -> Search[int | None]:
    """Find the largest level that holds, None where even `low` does not.

    Goes two levels at a time until one holds and one does not, then tries the one between.
    """
    level = min(high, max(low, begin))
    if (yield from holds(level)):
        while level < high and (yield from holds(min(high, level + 2))):
            level = min(high, level + 2)
        return level + 1 if level < high and (yield from holds(level + 1)) else level
    while level > low:
        level = max(low, level - 2)
        if (yield from holds(level)):
            return level + 1 if (yield from holds(level + 1)) else level
    return None


@dataclass(frozen=True)
class Question:
    """What a group of variants is asked: users, trace, candidates."""

    population: Population
    trace: str
    candidates: int = 100

    def plan(self, variant: Variant, rate: float, number: int, kind: str) -> RunPlan:
        """Return a run of a variant."""
        return RunPlan(
            variant,
            self.population,
            self.trace,
            rate,
            kind,  # type: ignore[arg-type]
            number,
            self.candidates,
        )


class RateSearch:
    """The search of one group: variants that answer the same question."""

    def __init__(self, runner: Runner, question: Question, variants: Sequence[Variant]) -> None:
        self.runner, self.question, self.variants = runner, question, variants

    def first_valid(self, variant: Variant) -> Search[int | None]:
        """Find the largest level at or below the search's that LoadGen calls VALID once of two."""
        sizes = self.runner.sizes
        rate = min(sizes.most_rate, BEGIN * self.ideal_rate(variant))
        begin = max(LOWEST_LEVEL, level_of(max(LOWEST_RATE, rate)))
        level = yield from largest_held(
            lambda each: self._holds(variant, each), begin, LOWEST_LEVEL, begin + sizes.climb
        )
        while level is not None and level >= LOWEST_LEVEL:
            for number in range(1, TRIES + 1):
                if (yield from self._valid(variant, level, number)):
                    return level
            level -= 1
        return None

    def rates(self) -> dict[str, float | None]:
        """Return the rate of each variant that two of three verdicts call VALID."""
        searches = [self._rate(variant) for variant in self.variants]
        found = take_turns(self.runner.run, searches)
        return {variant.name: rate for variant, rate in zip(self.variants, found, strict=True)}

    def ideal_rate(self, variant: Variant, computed: float = 1.0, inline: float = 0.0) -> float:
        """Return the ideal queue's rate of a variant's measured service times.

        `computed` and `inline` are shares of requests; see `RelayTimes`. What the relay ranks in
        line nobody announced: it takes as long as on the server that ranks everything so, where
        that is measured.
        """
        times = self.service(variant)["samples"]
        slo = self.runner.slo
        if not variant.preinfer:
            return inline_rate(times["rank_s"], variant.instances, slo)
        both, hits = median(times["rank_s"]), times["hit_s"]
        prefill = [max(0.0, both - median(hits))]
        alone = times["rank_s"]
        for other in self.variants:
            if other.name == "W1":
                alone = self.service(other)["samples"]["rank_s"]
        relay = RelayTimes(hits, prefill, alone, computed, inline)
        return relay_rate(relay, variant.instances, slo)

    def service(self, variant: Variant) -> Row:
        """Return the measured service times of a variant."""
        return self.runner.run(self.question.plan(variant, 0.0, 1, "service"))

    def verdicts(self, variant: Variant, rate: float) -> list[Row]:
        """Return the verdicts on a rate that were made."""
        plans = [
            self.question.plan(variant, rate, number, "verdict")
            for number in range(1, VERDICTS + 1)
        ]
        return [self.runner.run(plan) for plan in plans if self.runner.known(plan)]

    def _rate(self, variant: Variant) -> Search[float | None]:
        """Go down from the first VALID level until two of three verdicts are VALID."""
        level = yield from self.first_valid(variant)
        while level is not None and level >= LOWEST_LEVEL:
            valid = 0
            for number in range(1, VERDICTS + 1):
                valid += yield from self._valid(variant, level, number)
            if valid >= NEEDED:
                return rate_of(level)
            level -= 1
        return None

    def _holds(self, variant: Variant, level: int) -> Search[bool]:
        for number in range(1, TRIES + 1):
            row = yield self.question.plan(variant, rate_of(level), number, "probe")
            if row["holds"]:
                return True
        return False

    def _valid(self, variant: Variant, level: int, number: int) -> Search[bool]:
        row = yield self.question.plan(variant, rate_of(level), number, "verdict")
        return bool(row["verdict"] == "VALID")


class LengthSearch:
    """The longest history at a fixed rate."""

    def __init__(
        self, runner: Runner, rate: float, users: int, num_items: int, first: int, most: int
    ) -> None:
        self.runner, self.rate, self.users, self.num_items = runner, rate, users, num_items
        self.first, self.highest = first, math.floor(math.log(most / first) / math.log(STEP))

    def length_of(self, level: int) -> int:
        """Return the behaviours of a level: a multiple of 16."""
        return round(self.first * STEP**level / 16) * 16

    def longest(self, variant: Variant, begin: int) -> Search[int]:
        """Find the longest history that LoadGen calls VALID once of two, 0 where none is."""
        level = yield from largest_held(
            lambda each: self._holds(variant, each),
            round(math.log(begin / self.first) / math.log(STEP)),
            0,
            self.highest,
        )
        while level is not None and level >= 0:
            for number in range(1, TRIES + 1):
                row = yield self._plan(variant, level, "verdict", number)
                if row["verdict"] == "VALID":
                    return self.length_of(level)
            level -= 1
        return 0

    def _holds(self, variant: Variant, level: int) -> Search[bool]:
        for number in range(1, TRIES + 1):
            row = yield self._plan(variant, level, "probe", number)
            if row["holds"]:
                return True
        return False

    def _plan(self, variant: Variant, level: int, kind: str, number: int) -> RunPlan:
        length = self.length_of(level)
        population = Population(f"{length}L", self.users, self.num_items, length)
        question = Question(population, "S")
        return replace(question.plan(variant, self.rate, number, kind))
