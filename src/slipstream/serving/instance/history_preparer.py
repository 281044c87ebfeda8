"""How a request gets the history it is scored behind: from which prefix, in how many passes.

A prefix that is kept or being filled is used. Without one the history is computed: first its prefix
and then the candidates behind it, or, where that is cheaper, all in the one pass that scores, which
leaves the prefix in the cache where enough users come back for theirs. Touch this when a request
may be computed in another order of passes; what the passes take is in estimates.py.
"""

import math
from dataclasses import dataclass

from slipstream.serving.cache.inflight import PrefixRequest
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.passes import CANDIDATE_TILE
from slipstream.serving.instance.estimates import RequestEstimates
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.prefix_manager import PrefixManager, ReadyHistory
from slipstream.serving.instance.returning_users import ReturningUsers


@dataclass(frozen=True)
class PreparedRequest:
    """What is prepared: a user's older behaviours, whose prefix may be kept, and newer ones.

    `one_pass`: all candidates are scored at once, so that pass may compute the prefix too.
    """

    user: str
    older: EncodedHistory
    newer: EncodedHistory
    candidates: int
    deadline: float
    allow_truncate: bool = False
    one_pass: bool = False


class HistoryPreparer:
    """Finds or computes the prefixes of requests to one engine."""

    def __init__(
        self,
        engine: Engine,
        config: InstanceConfig,
        estimates: RequestEstimates,
        prefixes: PrefixManager,
    ) -> None:
        self.engine, self.config, self.estimates = engine, config, estimates
        self.prefixes, self.clock = prefixes, prefixes.clock
        self.returning = ReturningUsers(config.device_bytes + config.host_bytes)

    async def prepare(self, request: PreparedRequest) -> ReadyHistory:
        """Return what the request is scored behind; `OverloadError` where that is too late."""
        tokens = self.engine.cached_tokens(len(request.older))
        if self.config.relay and self.estimates.prefix_pays(tokens):
            self.returning.note(request.user, self.engine.prefix_bytes(len(request.older)))
            return await self._with_prefix(request)
        return await self._in_line(request)

    async def _with_prefix(self, request: PreparedRequest) -> ReadyHistory:
        """Use the prefix of the older behaviours, or compute it: now, or in the scoring pass."""
        whole, deadline = request.older.then(request.newer), request.deadline
        candidates = min(request.candidates, CANDIDATE_TILE)
        wanted = PrefixRequest(self.engine, request.user, request.older)
        held, hit = await self.prefixes.find(wanted, candidates, deadline)
        if held is not None and hit is not None:
            return ReadyHistory(held, whole.part(held.prefix.behaviours), hit, False)
        fill = self.prefixes.inflight.estimate(wanted)
        in_one_pass = (
            request.one_pass
            and hit is not None  # else one is being filled, but comes too late
            and fill.source == "computed"
            and self.estimates.one_pass_pays(len(whole), candidates)
        )
        prefill = math.inf if hit is None else None if in_one_pass else fill.seconds
        kept = self._behaviours_in_time(request, whole, prefill)
        if kept < len(whole):
            return ReadyHistory(None, whole.part(len(whole) - kept), "inline", True)
        if in_one_pass:
            pays = self.estimates.keeping_pays(len(request.older), self.returning.share)
            filled = self.prefixes.begin_fill(wanted) if pays else None
            return ReadyHistory(None, whole, "inline", False, filled)
        held, hit = await self.prefixes.compute(wanted, deadline)
        behaviours = 0 if held is None else held.prefix.behaviours
        return ReadyHistory(held, whole.part(behaviours), hit, False)

    async def _in_line(self, request: PreparedRequest) -> ReadyHistory:
        """Keep nothing: one pass, or a prefix in memory of its own where that is cheaper."""
        whole = request.older.then(request.newer)
        separate = self.estimates.separate_prefill_seconds(
            len(whole), min(request.candidates, CANDIDATE_TILE)
        )
        kept = self._behaviours_in_time(request, whole, separate)
        if kept < len(whole) or separate is None:
            return ReadyHistory(None, whole.part(len(whole) - kept), "inline", kept < len(whole))
        wanted = PrefixRequest(self.engine, request.user, whole)
        held = await self.prefixes.compute_private(wanted, request.deadline)
        return ReadyHistory(held, whole.part(held.prefix.behaviours), "inline", False)

    def _behaviours_in_time(
        self, request: PreparedRequest, whole: EncodedHistory, prefill: float | None
    ) -> int:
        """Return how many of the newest behaviours can be ranked before the deadline."""
        queued = self.prefixes.jobs.scheduler.backlog(request.deadline)
        return self.estimates.behaviours_in_time(
            len(whole),
            min(request.candidates, CANDIDATE_TILE),
            request.deadline - self.clock.now() - queued,
            queued=queued,
            prefill=prefill,
            allow_truncate=request.allow_truncate,
        )
