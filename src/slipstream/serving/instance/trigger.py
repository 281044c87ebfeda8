"""The sequence-aware trigger: which requests deserve a pre-inference.

A pre-inference is admitted only if

(a) the request is at risk: ranking its whole sequence in line would take more than a share of the
    budget at the present load (the rest of the budget is for what arrives between the signal and
    the ranking);
(b) it fits: what is pinned now, and what will be by Little's law (rate x time to consumption x
    size), stays below a share of the cache. The rate fades while nothing is admitted, so a busy
    minute is forgotten within seconds;
(c) it does not overload: a token bucket bounds the share of compute time that goes to
    pre-inference;
(d) it gains something: two passes take longer than one, so where only waiting puts the request at
    risk, the prefix must take at least a share of the budget out of the ranking, else it would feed
    the queue it flees from;
(e) it can be ready in time: what is queued, its own cost and the ranking behind it end within the
    ranking's budget. A ranking request that comes a little early joins the pre-inference under way,
    which then goes first. An idle instance tries what it predicts to take up to twice too long:
    that delays nobody, and shows how long it takes.

Every refusal has a reason, and it is counted. A refused request ranks in line; it never queues
here. Touch this when admission follows another rule.
"""

import math
from collections import Counter
from dataclasses import dataclass

from slipstream.serving.clock import SYSTEM_CLOCK, Clock

ADMITTED, NOT_AT_RISK, GAINS_LITTLE, NO_ROOM, OVERLOAD, TOO_LATE = (
    "admitted",
    "not_at_risk",
    "gains_little",
    "no_room",
    "overload",
    "too_late",
)
OPTIMISM = 2.0  # how far off a prediction may be that was not tested
RATE_SECONDS = 2.0  # how far back the rate of admissions looks
REFUSALS = (NOT_AT_RISK, GAINS_LITTLE, NO_ROOM, OVERLOAD, TOO_LATE)


@dataclass(frozen=True)
class TriggerConfig:
    """Bounds of admission."""

    enabled: bool = True
    # Of the ranking budget: a request that would take longer in line is at risk.
    risk_share: float = 0.4
    least_saved: float = 0.2  # of the ranking budget: what a prefix must save (see d)
    memory_share: float = 0.8  # of the device cache, for pinned and filling entries
    compute_share: float = 0.7  # of the compute thread's time, for pre-inference
    burst_seconds: float = 1.0  # pre-inference time that may be spent at once
    live_seconds: float = 0.5  # first guess of the time from admission to consumption


@dataclass(frozen=True)
class Prospect:
    """What is known of a request and of the instance when a pre-inference is signalled."""

    inline_tail: float  # seconds: 99th percentile of ranking it in line, without waiting
    waiting: float  # seconds: 99th percentile of what requests wait now
    saved: float  # seconds by which its prefix makes the ranking shorter
    prefill: float  # seconds of its pre-inference
    queued: float  # seconds of work that would go before it
    nbytes: int  # of its entry
    pinned: int  # bytes that cannot be evicted
    capacity: int  # bytes of the cache
    rank: float  # seconds of ranking from its prefix, 99th percentile
    rank_in: float  # seconds until its ranking is expected
    budget: float  # seconds the ranking stage may take


class Trigger:
    """Admission with its counters."""

    def __init__(self, config: TriggerConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        self.config, self.clock = config, clock
        now = clock.now()
        self.counts: Counter[str] = Counter()
        self._tokens, self._filled_at = config.burst_seconds, now
        self._live_seconds = config.live_seconds
        self._mean_bytes = 0.0
        self._rate, self._last_admission = 0.0, now

    def decide(self, prospect: Prospect) -> str:
        """Return `admitted`, or the reason against it."""
        now = self.clock.now()
        reason = self._reason(prospect, now)
        self.counts[reason] += 1
        if reason == ADMITTED:
            self._tokens -= prospect.prefill
            self._mean_bytes += (prospect.nbytes - self._mean_bytes) * (
                0.1 if self._mean_bytes else 1.0
            )
            self._rate = self.admissions_per_second + 1.0 / RATE_SECONDS
            self._last_admission = now
        return reason

    def consumed(self, seconds: float) -> None:
        """Note that an admitted prefix was used this long after its admission."""
        self._live_seconds += 0.05 * (seconds - self._live_seconds)

    @property
    def admissions_per_second(self) -> float:
        """The rate of admissions over the last seconds; it fades while nothing is admitted."""
        since = self.clock.now() - self._last_admission
        return self._rate * math.exp(-since / RATE_SECONDS)

    @property
    def expected_live_bytes(self) -> float:
        """The bytes by Little's law: rate of admission x time to consumption x size."""
        return self.admissions_per_second * self._live_seconds * self._mean_bytes

    def _reason(self, p: Prospect, now: float) -> str:
        """Refill the bucket and return the first reason against a request, or `admitted`."""
        refill = (now - self._filled_at) * self.config.compute_share
        self._tokens, self._filled_at = min(self.config.burst_seconds, self._tokens + refill), now
        if not self.config.enabled:
            return ADMITTED
        calm = self.config.risk_share * p.budget
        if p.inline_tail + p.waiting <= calm:
            return NOT_AT_RISK
        if p.inline_tail <= calm and p.saved < self.config.least_saved * p.budget:
            return GAINS_LITTLE
        room = self.config.memory_share * p.capacity
        if p.pinned + p.nbytes > room or self.expected_live_bytes + p.nbytes > room:
            return NO_ROOM
        prefill = p.prefill if p.queued else p.prefill / OPTIMISM
        if p.queued + prefill + p.rank > p.rank_in + p.budget:
            return TOO_LATE
        # A prefill longer than the burst may run when the bucket is full, else it never could.
        if self._tokens < min(p.prefill, self.config.burst_seconds):
            return OVERLOAD
        return ADMITTED
