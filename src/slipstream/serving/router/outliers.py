"""Outlier detection: which instance fails, or answers slowly, compared with the others.

An instance is compared with the other instances of its pool over the last seconds. What all of
them share (a store that is away, deadlines that are too short) makes none of them an outlier.
Touch this when an instance is judged by something else; balancer.py ejects and takes back.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

SHORTEST = 1e-6  # seconds of a request, so that a logarithm exists


@dataclass(frozen=True)
class OutlierConfig:
    """When an instance is an outlier, how many may be ejected, and for how long."""

    horizon: float = 10.0  # seconds after which an outcome counts a third
    min_requests: float = 5.0  # an instance with fewer is not judged, nor compared with
    failure_margin: float = 0.3  # of its requests fail, more than of the others'
    slow_factor: float = 3.0  # times as slow as the others, and
    slow_seconds: float = 0.05  # slower by this many seconds
    max_share: float = 0.5  # of the instances of a pool may be ejected
    ejection_seconds: float = 5.0  # doubled each time it fails its trial
    longest_ejection: float = 60.0


@dataclass
class RequestRecord:
    """The outcomes of an instance's requests; older ones fade.

    Times are summed as logarithms: the geometric mean of a few requests hardly notices one that
    took a hundred times as long, such as the first of a new process.
    """

    requests: float = 0.0
    failures: float = 0.0
    timed: float = 0.0  # requests whose seconds count
    log_seconds: float = 0.0
    at: float = 0.0

    def fade(self, now: float, horizon: float) -> None:
        """Let what is recorded count less, the older the less."""
        kept = math.exp(-max(0.0, now - self.at) / horizon)
        self.requests, self.failures = kept * self.requests, kept * self.failures
        self.timed, self.log_seconds, self.at = kept * self.timed, kept * self.log_seconds, now

    def add(self, *, failed: bool, seconds: float | None) -> None:
        """Count one request; `seconds` None where its time says nothing about the instance."""
        self.requests += 1
        self.failures += failed
        if seconds is not None:
            self.timed += 1
            self.log_seconds += math.log(max(seconds, SHORTEST))

    @property
    def typical_seconds(self) -> float:
        """The geometric mean of its times; 0 where none counts."""
        return math.exp(self.log_seconds / self.timed) if self.timed else 0.0

    @property
    def failure_share(self) -> float:
        """Failures of all requests."""
        return self.failures / self.requests if self.requests else 0.0


def may_be_outlier(own: RequestRecord, config: OutlierConfig) -> bool:
    """Return whether an instance can be an outlier at all, however well the others do.

    It costs the same with any number of instances, so most requests need no comparison.
    """
    if own.requests < config.min_requests:
        return False
    slow = own.timed >= config.min_requests and own.typical_seconds > config.slow_seconds
    return slow or own.failure_share > config.failure_margin


def find_fault(
    own: RequestRecord, others: Collection[RequestRecord], config: OutlierConfig
) -> str | None:
    """Return "failing" or "slow" where an instance is an outlier among the others, else None."""
    compared = [other for other in others if other.requests >= config.min_requests]
    if own.requests < config.min_requests or not compared:
        return None
    usual = sum(o.failures for o in compared) / sum(o.requests for o in compared)
    if own.failure_share > usual + config.failure_margin:
        return "failing"
    if own.timed < config.min_requests:
        return None
    return "slow" if own.typical_seconds > slow_limit(others, config) else None


def slow_limit(others: Collection[RequestRecord], config: OutlierConfig) -> float:
    """Return the seconds from which an instance counts as slow among the others."""
    times = [o.typical_seconds for o in others if o.timed >= config.min_requests]
    if not times:
        return math.inf
    usual = median(times)
    return max(config.slow_factor * usual, usual + config.slow_seconds)
