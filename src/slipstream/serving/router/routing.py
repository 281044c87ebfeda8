"""Who serves a user: rendezvous hashing over the instances, bounded by their load, with a breaker
around what fails.

Every router computes the same order for a user from the instances' names alone. The first of that
order which is usable and not overloaded serves; load is counted in tokens and before the request is
sent, so a burst on one user spreads instead of piling up. Where a router diverts a user, the ticket
remembers it. No clock, socket or task lives here: time is handed in.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import xxhash

Pool = Literal["any", "long", "short"]


@dataclass
class Breaker:
    """Opens after `threshold` failures in a row; after `cooldown` seconds one trial at a time
    passes, and its success closes it.
    """

    threshold: int = 3
    cooldown: float = 1.0
    failures: int = 0
    retry_at: float = 0.0

    def allows(self, now: float) -> bool:
        return self.failures < self.threshold or now >= self.retry_at

    def passing(self, now: float) -> None:
        """A request goes out: while open, the next trial waits for another cooldown."""
        if self.failures >= self.threshold:
            self.retry_at = now + self.cooldown

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, now: float) -> None:
        self.failures += 1
        self.retry_at = now + self.cooldown


@dataclass(eq=False)
class Member:
    """An instance as a router sees it. `reported` is the backlog in tokens it last told;
    `outstanding` is what this router sent.
    """

    name: str
    url: str
    pool: Pool = "any"
    ready: bool = True
    draining: bool = False
    outstanding: int = 0
    reported: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = xxhash.xxh3_64_intdigest(self.name.encode())

    @property
    def load(self) -> int:
        """Tokens of work it has: what we know we sent, or what it says, whichever is more."""
        return max(self.outstanding, self.reported)

    def usable(self, now: float) -> bool:
        return self.ready and not self.draining and self.breaker.allows(now)


def rendezvous(user: str, members: Iterable[Member]) -> list[Member]:
    """The members in this user's own order: highest hash first. Adding or removing one moves only
    that one's users.
    """
    key = user.encode("utf-8", "surrogatepass")
    digest = xxhash.xxh3_64_intdigest
    return sorted(members, key=lambda member: digest(key, seed=member.seed), reverse=True)


class Routing:
    """The choice of an instance for each request.

    A member may hold `load_factor` times the mean load, and always `slack_tokens`, so that affinity
    holds on an idle fleet. With `long_from`, requests of that many tokens or more go to members of
    pool `long`, others to `short`; `any` serves both.
    """

    def __init__(
        self,
        members: Iterable[Member],
        *,
        load_factor: float = 1.25,
        slack_tokens: int = 1_024,
        long_from: int | None = None,
    ) -> None:
        self.members = list(members)
        self.by_name = {member.name: member for member in self.members}
        if len(self.by_name) != len(self.members) or not self.members:
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
    ) -> Member | None:
        """The instance for this request, or None when nobody is left.

        The owner named by a ticket is taken while it is usable, loaded or not: its prefix is worth
        more than an even load.
        """
        holder = self.by_name.get(owner) if owner is not None else None
        if holder is not None and holder.name not in tried and holder.usable(now):
            return holder
        usable = [
            member for member in self.members if member.name not in tried and member.usable(now)
        ]
        usable = self._of_pool(usable, tokens)
        if not usable:
            return None
        bound = self.load_factor * (sum(member.load for member in usable) + tokens) / len(usable)
        for member in rendezvous(user, usable):
            if member.load + tokens <= bound or member.load <= self.slack_tokens:
                return member
        return min(usable, key=lambda member: member.load)

    def _of_pool(self, members: list[Member], tokens: int) -> list[Member]:
        """The members of the pool this request belongs to; all of them when that pool has nobody
        left.
        """
        if self.long_from is None:
            return members
        pool = "long" if tokens >= self.long_from else "short"
        return [member for member in members if member.pool in (pool, "any")] or members

    @contextlib.contextmanager
    def lease(self, member: Member, tokens: int, now: float) -> Iterator[None]:
        """Counts the request as outstanding from before it is sent until its answer is here."""
        member.outstanding += tokens
        member.breaker.passing(now)
        try:
            yield
        finally:
            member.outstanding -= tokens
