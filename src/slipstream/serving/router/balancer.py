"""The instance for a request: the user's order of instances (hashing.py), bounded by their load.

The first usable instance of the order that is not overloaded serves the request. Load is counted in
tokens and before the request is sent, so a burst of one user spreads over the instances. A circuit
breaker keeps requests away from an instance that fails. No clock, socket or task is here: callers
pass the time. Touch this when requests choose their instance in another way.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from slipstream.serving.router.hashing import rendezvous_order, seed_of

Pool = Literal["any", "long", "short"]


@dataclass
class CircuitBreaker:
    """Opens after `threshold` failures in a row, then lets one trial pass every `cooldown` seconds.

    The first success closes it.
    """

    threshold: int = 3
    cooldown: float = 1.0
    failures: int = 0
    retry_at: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.failures < self.threshold or now >= self.retry_at

    def note_request(self, now: float) -> None:
        """Count a request that is sent: while open, the next trial waits for another cooldown."""
        if self.failures >= self.threshold:
            self.retry_at = now + self.cooldown

    def note_success(self) -> None:
        """Close the breaker."""
        self.failures = 0

    def note_failure(self, now: float) -> None:
        """Count a failure."""
        self.failures += 1
        self.retry_at = now + self.cooldown


@dataclass(eq=False)
class InstanceState:
    """What a router knows of an instance.

    `reported` is the backlog in tokens that the instance last reported; `outstanding` is the tokens
    of the requests this router has sent and that are not answered yet.
    """

    name: str
    url: str
    pool: Pool = "any"
    ready: bool = True
    draining: bool = False
    outstanding: int = 0
    reported: int = 0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = seed_of(self.name)

    @property
    def load(self) -> int:
        """Tokens of work the instance has: those outstanding or those reported, the larger."""
        return max(self.outstanding, self.reported)

    def usable(self, now: float) -> bool:
        """Whether requests may be sent to it now."""
        return self.ready and not self.draining and self.breaker.allows(now)


def instance_order(user: str, instances: Iterable[InstanceState]) -> list[InstanceState]:
    """The instances in this user's order, most preferred first."""
    return rendezvous_order(user, instances, attrgetter("seed"))


class LoadBalancer:
    """Chooses an instance for each request.

    An instance may hold `load_factor` times the mean load, and always `slack_tokens`, so that users
    keep their instance while there is little load. With `long_from`, requests of that many tokens
    or more go to instances of pool `long`, others to `short`; those of pool `any` serve both.
    """

    def __init__(
        self,
        instances: Iterable[InstanceState],
        *,
        load_factor: float = 1.25,
        slack_tokens: int = 1_024,
        long_from: int | None = None,
    ) -> None:
        self.instances = list(instances)
        self.by_name = {instance.name: instance for instance in self.instances}
        if len(self.by_name) != len(self.instances) or not self.instances:
            raise ValueError("a router needs at least one instance, each with its own name")
        if load_factor < 1:
            raise ValueError("load_factor is at least 1: below it not even an even load would fit")
        self.load_factor, self.slack_tokens, self.long_from = load_factor, slack_tokens, long_from

    def choose(
        self,
        user: str,
        tokens: int,
        now: float,
        *,
        owner: str | None = None,
        tried: Collection[str] = (),
    ) -> InstanceState | None:
        """Choose the instance for a request, None when no usable one is left.

        The owner that a ticket names is taken while it is usable, whatever its load: the prefix it
        holds is worth more than an even load.
        """
        holder = self.by_name.get(owner) if owner is not None else None
        if holder is not None and holder.name not in tried and holder.usable(now):
            return holder
        usable = [
            instance
            for instance in self.instances
            if instance.name not in tried and instance.usable(now)
        ]
        usable = self._of_pool(usable, tokens)
        if not usable:
            return None
        total = sum(instance.load for instance in usable) + tokens
        bound = self.load_factor * total / len(usable)
        for instance in instance_order(user, usable):
            if instance.load + tokens <= bound or instance.load <= self.slack_tokens:
                return instance
        return min(usable, key=lambda instance: instance.load)

    def _of_pool(self, instances: list[InstanceState], tokens: int) -> list[InstanceState]:
        """The instances of the request's pool; all of them when that pool has none left."""
        if self.long_from is None:
            return instances
        pools = ("long" if tokens >= self.long_from else "short", "any")
        return [instance for instance in instances if instance.pool in pools] or instances

    @contextlib.contextmanager
    def outstanding(self, instance: InstanceState, tokens: int, now: float) -> Iterator[None]:
        """Count a request as outstanding from before it is sent until its answer is here."""
        instance.outstanding += tokens
        instance.breaker.note_request(now)
        try:
            yield
        finally:
            instance.outstanding -= tokens
