"""Outlier detection: which instance fails, or answers slowly, compared with the others.

An instance is compared with the other instances of its pool over the last seconds. What all of
them share (a store that is away, deadlines that are too short) makes none of them an outlier.
Touch this when an instance is judged by something else; balancer.py ejects and takes back.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median


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
    """The outcomes of an instance's requests; older ones fade."""

    requests: float = 0.0
    failures: float = 0.0
    timed: float = 0.0  # requests whose seconds count
    seconds: float = 0.0
    at: float = 0.0

    def fade(self, now: float, horizon: float) -> None:
        """Let what is recorded count less, the older the less."""
        kept = math.exp(-max(0.0, now - self.at) / horizon)
        self.requests, self.failures = kept * self.requests, kept * self.failures
        self.timed, self.seconds, self.at = kept * self.timed, kept * self.seconds, now

    def add(self, *, failed: bool, seconds: float | None) -> None:
        """Count one request; `seconds` None where its time says nothing about the instance."""
        self.requests += 1
        self.failures += failed
        if seconds is not None:
            self.timed += 1
            self.seconds += seconds

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
    slow = own.timed >= config.min_requests and own.seconds > config.slow_seconds * own.timed
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
    return "slow" if own.seconds / own.timed > slow_limit(others, config) else None


def slow_limit(others: Collection[RequestRecord], config: OutlierConfig) -> float:
    """Return the seconds from which an instance counts as slow among the others."""
    means = [o.seconds / o.timed for o in others if o.timed >= config.min_requests]
    if not means:
        return math.inf
    usual = median(means)
    return max(config.slow_factor * usual, usual + config.slow_seconds)
