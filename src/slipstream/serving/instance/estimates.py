"""What a request will cost an instance, in predicted seconds, and what fits before its deadline.

Touch this when a request is computed in another order of passes; the seconds of one pass are in
cost_model.py.
"""

import bisect
import functools
import math
from collections.abc import Callable, Sequence

from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.passes import CANDIDATE_TILE
from slipstream.serving.engine.rank_query import RankQuery
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.request_stages import computed_in_line
from slipstream.serving.request_errors import OverloadError


class RequestEstimates:
    """Predicted seconds of requests to one engine."""

    def __init__(self, engine: Engine, cost: CostModel, config: InstanceConfig) -> None:
        self.engine, self.cost, self.config = engine, cost, config

    def batch_seconds(self, queries: Sequence[RankQuery]) -> float:
        """Predict one pass over these queries."""
        total = sum(self._query_seconds(query, query.candidates_C.numel()) for query in queries)
        if len(queries) > 1:
            total -= (len(queries) - 1) * self.cost.pass_seconds(0, 0)
        return total

    def _query_seconds(self, query: RankQuery, candidates: int) -> float:
        """Predict one query's part of a pass, for so many of its candidates."""
        past = 0 if query.past is None else query.past.tokens
        behaviours = self.engine.tokens_per_behaviour * len(query.new)
        user = 0 if past else self.engine.user_tokens
        return self.cost.pass_seconds(behaviours + candidates + user, past)

    def score_seconds(self, query: RankQuery) -> float:
        """Predict the scoring of one query, its candidates in tiles."""
        candidates = query.candidates_C.numel()
        seconds = self._query_seconds(query, min(candidates, CANDIDATE_TILE))
        if candidates > CANDIDATE_TILE:
            past = 0 if query.past is None else query.past.tokens
            before = past + self.engine.tokens_per_behaviour * len(query.new)
            further = math.ceil(candidates / CANDIDATE_TILE) - 1
            seconds += further * self.cost.pass_seconds(CANDIDATE_TILE, before)
        return seconds

    def rank_seconds(self, past_tokens: int, candidates: int) -> float:
        """Predict the ranking of candidates behind a prefix, its held behaviours included."""
        return self.cost.pass_seconds(self._held_tokens + candidates, past_tokens)

    def inline_seconds(self, tokens: int, candidates: int) -> float:
        """Predict a ranking in line of a history whose prefix has so many tokens."""
        one_pass = self.cost.pass_seconds(tokens + self._held_tokens + candidates, 0)
        two = self.cost.prefill_seconds(tokens) + self.rank_seconds(tokens, candidates)
        return min(one_pass, two)

    def prefix_pays(self, tokens: int) -> bool:
        """Return whether a prefix saves a ranking more than the extra call to compute it costs.

        A short history is ranked in one pass.
        """
        if computed_in_line():
            return False
        if not tokens or not self.config.trigger.enabled:
            return tokens > 0
        saved = self.saved_seconds(tokens, self.config.expected_candidates)
        return saved > self.cost.plain_seconds(0, 0)

    def keeping_pays(self, behaviours: int, returning: float) -> bool:
        """Return whether a ranking in line should leave its prefix in the cache.

        It should where `returning`, the share of users who come back, times what a prefix saves is
        more than what keeping takes: a copy, and about as much work around it as a call.
        """
        if not self.config.trigger.enabled:
            return True
        tokens = self.engine.cached_tokens(behaviours)
        saved = self.saved_seconds(tokens, self.config.expected_candidates)
        taken = self.cost.copy_seconds(self.engine.prefix_bytes(behaviours))
        return returning * saved > taken + self.cost.plain_seconds(0, 0)

    @functools.cached_property
    def from_behaviours(self) -> int:
        """The fewest behaviours whose pre-inference gains enough to be asked for.

        One more than the model reads where none does. By what was measured at the start.
        """
        config, most = self.config, self.engine.rules.max_len
        if not (config.relay and config.preinfer):
            return most + 1
        least = config.trigger.least_saved if config.trigger.enabled else 0.0

        def gains(behaviours: int) -> bool:
            tokens = self.engine.cached_tokens(behaviours)
            saved = self.saved_seconds(tokens, config.expected_candidates)
            return self.prefix_pays(tokens) and saved >= least * config.ranking_budget

        return bisect.bisect_left(range(1, most + 1), True, key=gains) + 1

    def saved_seconds(self, tokens: int, candidates: int) -> float:
        """Predict by how much a prefix makes a ranking shorter than one in line.

        Both would run on this machine now, so what either has lately met elsewhere is left out.
        """
        new = self._held_tokens + candidates
        return self.cost.plain_seconds(tokens + new, 0) - self.cost.plain_seconds(new, tokens)

    def one_pass_pays(self, behaviours: int, candidates: int) -> bool:
        """Return whether ranking a whole history at once is cheaper than prefill and ranking.

        The prefix is copied out of the pass, which keeps it as it was computed: in floats. A pass
        cannot be interrupted, so a long history is computed in steps.
        """
        tokens = self.engine.tokens_of(behaviours) + candidates
        return (
            self.engine.shape.precision == "fp32"
            and self.cost.pass_seconds(tokens, 0) <= self.config.longest_pass
            and self.separate_prefill_seconds(behaviours, candidates) is None
        )

    def separate_prefill_seconds(self, behaviours: int, candidates: int) -> float | None:
        """Predict a prefill where that and ranking behind it are cheaper than one pass, else None.

        They can be, because a prefill skips the attention of the last layer (see `layer_steps`).
        """
        tokens = self.engine.cached_tokens(behaviours)
        if not tokens:
            return None
        last = self._held_tokens + candidates
        prefill = self.cost.prefill_seconds(tokens)
        one_pass = self.cost.plain_seconds(tokens + last, 0)
        two = prefill / self.cost.factor("prefill") + self.cost.plain_seconds(last, tokens)
        return prefill if two < one_pass else None

    def behaviours_in_time(
        self,
        behaviours: int,
        candidates: int,
        slack: float,
        *,
        queued: float,
        prefill: float | None,
        allow_truncate: bool,
    ) -> int:
        """Return how many of the newest behaviours can be ranked within `slack` seconds.

        All of them, fewer where `allow_truncate`, else `OverloadError`. `prefill` are the seconds
        of a prefill before the ranking, None where all is one pass. Where nothing is queued, a
        request is tried that only the cost model's own correction forbids: that delays nobody, and
        shows whether the machine is still that slow.
        """
        tokens = self.engine.tokens_of(behaviours)
        if prefill is None:
            kind, needed = "inline", self.cost.pass_seconds(tokens + candidates, 0)
        else:
            kind, needed = "prefill", prefill + self.rank_seconds(tokens, candidates)
        if needed <= slack:
            return behaviours
        if not allow_truncate:
            if not queued and needed / max(1.0, self.cost.factor(kind)) <= slack:
                return behaviours
            raise OverloadError(
                "too_slow",
                "ranking the whole history would miss the deadline, and truncation was not allowed",
            )
        kept = most_within(
            slack,
            behaviours,
            lambda count: self.cost.pass_seconds(self.engine.tokens_of(count) + candidates, 0),
        )
        if not kept:
            raise OverloadError("too_slow")
        return kept

    @property
    def _held_tokens(self) -> int:
        return self.engine.tokens_per_behaviour * self.engine.hold


def most_within(slack: float, most: int, seconds: Callable[[int], float]) -> int:
    """Return the largest count up to `most` whose seconds fit `slack`, by bisection; 0 if none."""
    if seconds(1) > slack:
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= slack else (low, middle - 1)
    return low
