"""The history store: what each user did, so that a request may name a user and send no history.

Touch this when a store offers something else, or when another kind of store is opened. A store
knows nothing of a model: ids are whole numbers or text, and a behaviour keeps the actions it was
sent with. A behaviour keeps its number for ever; `first` is the number of the oldest one still
kept. There are two stores, opened by URL: `sqlite_store` (a file, many processes on one machine)
and `redis_store` (many machines). How behaviours become bytes is in `behaviour_blocks`, what may be
appended in `append_rules`.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History

KEEP = 65_536  # behaviours kept per user unless another number is given


class AppendError(SlipstreamError):
    """Behaviours that do not continue what is stored; the text gives the cause."""


class HistoryStoreError(SlipstreamError):
    """The store cannot be used: locked, gone, read-only, full or damaged; the text says which.

    One that is `temporary` may pass by itself, so a server starts in spite of it.
    """

    def __init__(self, message: str, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary


class HistoryStore(Protocol):
    """What both stores offer. Every call is a coroutine that leaves the event loop free.

    A call that has no answer within its `seconds` ends with `HistoryStoreError`.
    """

    async def append(
        self,
        user: str,
        history: History,
        after: int | None = None,
        now: float | None = None,
        seconds: float | None = None,
    ) -> int:
        """Add behaviours, all or none, and return how many there are now.

        `AppendError` where time goes back or lies a day after `now` (seconds; default: the clock),
        where the ids are of another kind, or where `after` is not the number stored. Once it has
        failed or was cancelled, nothing is stored any more.
        """

    async def read(
        self, user: str, limit: int, since: int | None = None, seconds: float | None = None
    ) -> History | None:
        """Return the newest `limit` behaviours, or those from `since` on; None: unknown user.

        `items` is int64, or an object array of text; an absent action counts as 0.
        """

    async def delete(self, user: str, seconds: float | None = None) -> int:
        """Forget a user and return how many behaviours were deleted."""

    async def users(self, after: str | None = None, limit: int = 1000) -> list[str]:
        """Return at most `limit` users in the order of their code points, those after `after`."""

    async def import_histories(
        self, histories: Sequence[tuple[str, History]], replace: bool = False
    ) -> list[str]:
        """Store whole histories of different users, each all or none; return whose were stored.

        A user who has behaviours is skipped, or replaced. Numbers begin with `History.first`.
        """

    async def check(self) -> None:
        """Check that the store answers; `HistoryStoreError` where it does not."""

    async def migrate(self) -> int:
        """Bring a store of the earlier format to this one; return how many users were moved."""

    async def close(self) -> None:
        """Close files and connections."""


def open_history_store(
    url: str, keep: int = KEEP, create: bool = True, patient: bool = False
) -> HistoryStore:
    """Open the store at `sqlite:PATH` or `redis://HOST:PORT/DB`; `create`: a file may be new.

    A `patient` one is opened by its first call, and by the next where that fails.
    """
    if keep < 1:
        raise SlipstreamError(f"a history store keeps at least 1 behaviour of a user, not {keep}")
    if url.startswith("sqlite:") and url != "sqlite:":
        from slipstream.history.sqlite_store import SqliteHistoryStore

        return SqliteHistoryStore(url.removeprefix("sqlite:"), keep, create, patient)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from slipstream.history.redis_store import RedisHistoryStore

        return RedisHistoryStore(url, keep)
    raise SlipstreamError(
        f"'{url}' names no history store; use sqlite:PATH or redis://HOST:PORT/DB"
    )


def url_without_password(url: str) -> str:
    """Return a store's URL as it may be shown."""
    return re.sub("//[^/]*@", "//", url)
