"""The instance for a request: the user's order of instances (hashing.py), bounded by their load.

The first usable instance of the order that is not overloaded serves the request. Load is counted in
behaviours and before the request is sent, so a burst of one user spreads over the instances. A
circuit breaker keeps requests away from an instance that fails several times in a row, and from one
that fails more often or answers slower than the others (outliers.py). No socket or task is here.
Touch this when requests choose their instance in another way.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.router.hashing import rendezvous_first, rendezvous_order, seed_of
from slipstream.serving.router.outliers import (
    OutlierConfig,
    RequestRecord,
    find_fault,
    may_be_outlier,
    slow_limit,
)
from slipstream.serving.router.placements import Placements

Pool = Literal["any", "long", "short"]


@dataclass
class CircuitBreaker:
    """Opens after `threshold` failures in a row, then lets one trial pass every `cooldown` seconds.

    A trial that succeeds closes it; answers to requests from before it opened do not.
    """

    threshold: int = 3
    cooldown: float = 1.0
    failures: int = 0
    retry_at: float = 0.0
    on_trial: bool = False

    @property
    def open(self) -> bool:
        """Whether only trials may pass."""
        return self.failures >= self.threshold

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.failures < self.threshold or now >= self.retry_at

    def note_request(self, now: float) -> None:
        """Count a request that is sent: while open, the next trial waits for another cooldown."""
        if self.open:
            self.retry_at, self.on_trial = now + self.cooldown, True

    def note_success(self) -> None:
        """Count a success: it closes the breaker, unless that is open and no trial was sent."""
        if self.on_trial or not self.open:
            self.reset()

    def note_failure(self, now: float) -> None:
        """Count a failure."""
        self.failures += 1
        self.retry_at, self.on_trial = now + self.cooldown, False

    def trip(self, now: float, seconds: float) -> None:
        """Open it at once: the first trial is due after so many seconds."""
        self.failures = max(self.failures, self.threshold)
        self.retry_at, self.on_trial = now + seconds, False

    def reset(self) -> None:
        """Close it and forget every failure."""
        self.failures, self.on_trial = 0, False


@dataclass(eq=False)
class InstanceState:
    """What a router knows of an instance.

    `reported` is the backlog in behaviours that the instance last reported; `outstanding` is the
    behaviours of the requests this router has sent and that are not answered yet. `ejections`
    counts how often in a row it was found to be an outlier. One that is `leaving` is listed no
    more: it finishes what it has.
    """

    name: str
    url: str
    pool: Pool = "any"
    ready: bool = True
    draining: bool = False
    leaving: bool = False
    outstanding: int = 0
    reported: int = 0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    record: RequestRecord = field(default_factory=RequestRecord)
    ejections: int = 0
    ejected_at: float = 0.0
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = seed_of(self.name)

    @property
    def load(self) -> int:
        """Behaviours of work the instance has: those outstanding or those reported, the larger."""
        # Read of every instance for many a request: shorter than a call of `max`.
        return self.outstanding if self.outstanding > self.reported else self.reported

    def usable(self, now: float) -> bool:
        """Whether requests may be sent to it now."""
        healthy = not self.breaker.failures or self.breaker.allows(now)
        return healthy and self.ready and not self.out

    @property
    def out(self) -> bool:
        """Whether it takes nothing new, however well it is."""
        return self.draining or self.leaving

    def reset(self) -> None:
        """Forget every failure: a new process has taken its place."""
        self.breaker.reset()
        self.record, self.ejections = RequestRecord(), 0


def instance_order(user: str, instances: Iterable[InstanceState]) -> list[InstanceState]:
    """The instances in this user's order, most preferred first."""
    return rendezvous_order(user, instances, attrgetter("seed"))


class LoadBalancer:
    """Chooses an instance for each request.

    An instance may hold `load_factor` times the mean load, and always `slack_behaviours`, so that
    users keep their instance while there is little load. With `long_from`, requests of that many
    behaviours or more go to instances of pool `long`, others to `short`; those of pool `any` serve
    both. Without `affinity`, where instances keep nothing of a user, the one with the least load
    serves. A router that is `alone` remembers who served a user: a user it does not know is placed
    where the least load is, and so is one of whom nothing was kept, but to the same instance where
    loads are equal; one whose prefix was kept goes to the same instance as before.
    """

    def __init__(
        self,
        instances: Iterable[InstanceState],
        *,
        load_factor: float = 1.25,
        slack_behaviours: int = 1_024,
        long_from: int | None = None,
        affinity: bool = True,
        alone: bool = False,
        outliers: OutlierConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.instances = list(instances)
        self.by_name = {instance.name: instance for instance in self.instances}
        if len(self.by_name) != len(self.instances):
            raise ValueError("each instance of a router has its own name")
        if load_factor < 1:
            raise ValueError("load_factor is at least 1: below it not even an even load would fit")
        self.load_factor, self.slack_behaviours = load_factor, slack_behaviours
        self.long_from, self.affinity, self.clock = long_from, affinity, clock
        self.outliers = outliers or OutlierConfig()
        self._placements = Placements() if alone and affinity else None
        self.ejected: Counter[str] = Counter()  # by reason: failing, slow, trial_failed

    def add(self, instance: InstanceState) -> None:
        """Take another instance, under a name that no other has."""
        assert instance.name not in self.by_name
        self.instances.append(instance)
        self.by_name[instance.name] = instance

    def remove(self, instance: InstanceState) -> None:
        """Forget an instance."""
        self.instances.remove(instance)
        del self.by_name[instance.name]

    def choose(
        self,
        user: str,
        behaviours: int,
        *,
        owner: str | None = None,
        near: str | None = None,
        tried: Collection[str] = (),
    ) -> InstanceState | None:
        """Choose the instance for a request, None when no usable one is left.

        The owner that a ticket names is taken while it is usable, whatever its load: the prefix it
        holds is worth more than an even load. One that only knows the history is `near`: it is
        taken where no other has less to do.
        """
        now = self.clock.now()
        placed = self._placements.get(user) if self._placements is not None else None
        if near is None and placed is not None and not placed.kept:
            near = placed.name
        holder = self.by_name.get(owner) if owner is not None and self.affinity else None
        if holder is not None and holder.name not in tried and holder.usable(now):
            return holder
        if self.affinity and self.long_from is None:
            # Most requests need no look at the other instances.
            first = self._preferred(user)
            light = first is not None and first.load <= self.slack_behaviours
            if first is not None and light and first.name not in tried and first.usable(now):
                return first
        last = self._preferred(user) if self.affinity and self._placements is not None else None
        may_last = last is not None and last.name not in tried and last.usable(now)
        anywhere = not self.affinity or (self._placements is not None and not may_last)
        if anywhere and self.long_from is None:
            return self._idlest(user, self.instances, near, tried, now)
        usable = [
            instance
            for instance in self.instances
            if instance.usable(now) and instance.name not in tried
        ]
        usable = self._of_pool(usable, behaviours)
        if not usable:
            return None
        if anywhere or (self._placements is not None and last not in usable):
            return self._idlest(user, usable, near, tried, now)
        total = sum(instance.load for instance in usable) + behaviours
        bound = self.load_factor * total / len(usable)

        def fits(instance: InstanceState) -> bool:
            return instance.load + behaviours <= bound or instance.load <= self.slack_behaviours

        if last is not None and fits(last):
            return last
        fitting = [instance for instance in usable if fits(instance)]
        if fitting:
            return rendezvous_first(user, fitting, attrgetter("seed"))
        return min(usable, key=attrgetter("load"))

    def _idlest(
        self,
        user: str,
        instances: Sequence[InstanceState],
        near: str | None,
        tried: Collection[str],
        now: float,
    ) -> InstanceState | None:
        """The usable instance with the least load, the first after the one called `near`.

        Without that one, after the first of the user's order. None has less than no load, so most
        requests look at few instances.
        """
        first = self.by_name.get(near or "")
        if first is None or first not in instances:
            first = rendezvous_first(user, instances, attrgetter("seed")) if instances else None
        start = instances.index(first) if first is not None else 0
        found, least = None, 0
        for instance in itertools.chain(instances[start:], instances[:start]):
            load = instance.load
            better = found is None or load < least
            if better and instance.name not in tried and instance.usable(now):
                found, least = instance, load
                if not load:
                    break
        return found

    def _preferred(self, user: str) -> InstanceState | None:
        """The instance that keeps a user's prefix, or the first of the user's order."""
        if self._placements is None:
            instances = self.instances
            return rendezvous_first(user, instances, attrgetter("seed")) if instances else None
        placed = self._placements.get(user)
        return self.by_name.get(placed.name) if placed is not None and placed.kept else None

    def _of_pool(self, instances: list[InstanceState], behaviours: int) -> list[InstanceState]:
        """The instances of the request's pool; all of them when that pool has none left."""
        if self.long_from is None:
            return instances
        pools = ("long" if behaviours >= self.long_from else "short", "any")
        return [instance for instance in instances if instance.pool in pools] or instances

    @contextlib.contextmanager
    def outstanding(self, instance: InstanceState, behaviours: int) -> Iterator[None]:
        """Count a request as outstanding from before it is sent until its answer is here."""
        instance.outstanding += behaviours
        instance.breaker.note_request(self.clock.now())
        try:
            yield
        finally:
            instance.outstanding -= behaviours

    # What became of a request

    def note_served(self, user: str, instance: InstanceState, kept: bool = True) -> None:
        """Note that an instance served a user, and whether it has a prefix of theirs now."""
        if self._placements is not None:
            self._placements.note(user, instance.name, kept)

    def note_answer(
        self,
        instance: InstanceState,
        *,
        failed: bool = False,
        seconds: float | None = None,
        grave: bool = True,
    ) -> None:
        """Note an answer: its failure, its seconds where they say how fast the instance is.

        Only a `grave` failure counts towards failures in a row; one that the request itself may
        have caused, such as a deadline that was too short, counts only against the other
        instances' share of them. The breaker opens for answers while few others are ejected.
        """
        now, breaker = self.clock.now(), instance.breaker
        if breaker.open:
            if breaker.on_trial and (failed or self._is_slow(instance, seconds or 0.0)):
                self._eject(instance, "trial_failed", now)
            else:
                breaker.note_success()
            return
        if not failed:
            breaker.note_success()
        elif grave and self._may_eject(instance):
            breaker.note_failure(now)
        self._compare(instance, failed=failed, seconds=seconds)

    def note_silence(self, instance: InstanceState, *, grave: bool = True) -> None:
        """Note a request without an answer: the connection failed, or the time ran out.

        One that is `grave` counts towards failures in a row even where no instance is left.
        """
        if not grave:
            self.note_answer(instance, failed=True, grave=False)
            return
        instance.breaker.note_failure(self.clock.now())
        if not instance.breaker.open:
            self._compare(instance, failed=True, seconds=None)

    def _is_slow(self, instance: InstanceState, seconds: float) -> bool:
        """Return whether an answer took too long, compared with those of the other instances."""
        return seconds > slow_limit(self._others(instance), self.outliers)

    def _compare(self, instance: InstanceState, *, failed: bool, seconds: float | None) -> None:
        """Record a request, and eject the instance where that makes it an outlier."""
        now = self.clock.now()
        instance.record.fade(now, self.outliers.horizon)
        instance.record.add(failed=failed, seconds=seconds)
        if not may_be_outlier(instance.record, self.outliers):
            return
        fault = find_fault(instance.record, self._others(instance), self.outliers)
        if fault is not None and not instance.breaker.open and self._may_eject(instance):
            self._eject(instance, fault, now)

    def _others(self, instance: InstanceState) -> list[RequestRecord]:
        """Return the records of the pool's other instances that are in service, as of now."""
        now = self.clock.now()
        others = [
            other
            for other in self.instances
            if other is not instance and other.pool == instance.pool and not other.breaker.open
        ]
        for other in others:
            other.record.fade(now, self.outliers.horizon)
        return [other.record for other in others]

    def _may_eject(self, instance: InstanceState) -> bool:
        """Return whether one more instance of the pool may be out of service."""
        pool = [other for other in self.instances if other.pool == instance.pool]
        out = sum(other.breaker.open or not other.ready or other.out for other in pool)
        return out + 1 <= self.outliers.max_share * len(pool)

    def _eject(self, instance: InstanceState, reason: str, now: float) -> None:
        """Send an instance nothing but a trial now and then, the first after a while."""
        config = self.outliers
        if now - instance.ejected_at > 2 * config.longest_ejection:
            instance.ejections = 0  # it was well for long
        seconds = min(config.longest_ejection, config.ejection_seconds * 2**instance.ejections)
        instance.breaker.trip(now, seconds)
        instance.record = RequestRecord(at=now)
        instance.ejections, instance.ejected_at = instance.ejections + 1, now
        self.ejected[reason] += 1
