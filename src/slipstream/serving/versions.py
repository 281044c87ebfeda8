"""Which versions of a bundle a deployment serves, and to whom: stable, candidate, shadow.

A user's version follows from a hash of the user's id, so it is the same in every instance and stays
the same while the share grows: whoever had the candidate at 5 % has it at 20 %. The record is kept
by the supervisor, so that a crashed instance serves again what it served. Touch this when traffic
is divided in another way.
"""

import msgspec
import xxhash

_SHARES = 2.0**64


class VersionRecord(msgspec.Struct, frozen=True):
    """What is served: `share` of the users get the candidate, `shadow` of their rankings are
    scored by it too, without being answered by it.
    """

    stable: str
    candidate: str | None = None
    share: float = 0.0
    shadow: float = 0.0
    previous: str | None = None  # what was stable before: where a rollback leads
    number: int = 0  # of changes: the larger one is the later

    @property
    def open_versions(self) -> set[str]:
        """The versions that instances have open."""
        return {self.stable} if self.candidate is None else {self.stable, self.candidate}

    @property
    def kept_versions(self) -> set[str]:
        """The versions that can be opened again."""
        return self.open_versions | ({self.previous} if self.previous is not None else set())

    def version_of(self, user: str | None) -> str:
        """Return the version that serves a user; without a user, the stable one."""
        if self.candidate is None or user is None or user_place(user) >= self.share:
            return self.stable
        return self.candidate

    def shadows(self, user: str) -> bool:
        """Return whether a user's rankings are scored by the candidate too."""
        return self.candidate is not None and user_place(f"shadow {user}") < self.shadow

    def with_version(self, version: str, share: float, shadow: float) -> "VersionRecord":
        """Return the record in which `share` of the users get a version; at 1 it is stable."""
        if version == self.stable:
            return self if self.candidate is None else self._without_candidate()
        if share >= 1.0:
            return VersionRecord(version, previous=self.stable, number=self.number + 1)
        return VersionRecord(self.stable, version, share, shadow, self.previous, self.number + 1)

    def rolled_back(self) -> "VersionRecord | None":
        """Return the record without its candidate, or with the version before; None: no such."""
        if self.candidate is not None:
            return self._without_candidate()
        if self.previous is None:
            return None
        return VersionRecord(self.previous, previous=self.stable, number=self.number + 1)

    def _without_candidate(self) -> "VersionRecord":
        return VersionRecord(self.stable, previous=self.previous, number=self.number + 1)


def user_place(user: str) -> float:
    """Return a number from 0 to 1 that is a user's own, evenly spread over users."""
    return xxhash.xxh3_64_intdigest(user.encode("utf-8", "surrogatepass"), seed=17) / _SHARES
