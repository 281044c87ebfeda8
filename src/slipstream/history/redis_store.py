"""Histories in Redis, for instances on several machines: the same blocks, several keys a user.

Touch this when the keys in Redis change; the scripts that run there are in `redis_scripts`.

    {prefix}:history:{user}   a hash: first, total, time of the newest behaviour, kind of the ids,
                              its actions, and what packing needs (see below)
    {prefix}:blocks:{user}    a sorted set of blocks by the number of their first behaviour
    {prefix}:users            all users in order
    {prefix}:format           the format of this store

A script runs inside Redis, so that check, append and trim are one step for every client. An append
adds a block of its own. When `TAIL` blocks have gathered, the client that added the last one packs
them into blocks of `CHUNK` behaviours; a script replaces them only if nobody packed or deleted
them before. A failed packing loses nothing, and a later append tries again.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import redis.asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from slipstream.history import redis_scripts as scripts
from slipstream.history.append_rules import (
    MAX_ACTIONS,
    check_histories,
    check_history,
    check_user,
    id_kind,
    is_user,
    refuse_going_back,
    refuse_many_actions,
    refuse_other_kind,
    refuse_wrong_count,
)
from slipstream.history.behaviour_blocks import CHUNK, cut_blocks, merge_blocks, names_of
from slipstream.history.earlier_format import read_records
from slipstream.history.history_store import HistoryStoreError, url_without_password
from slipstream.history.user_history import History

FORMAT = "2"
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
CLOCK_SECONDS = 30.0  # after which Redis' clock is read again
CONNECTIONS = 32  # more calls at once wait for one of these
TAIL = 32  # blocks that gather before they are packed
INT64_SPAN = 2**63


class RedisHistoryStore:
    """A history store on a Redis server."""

    def __init__(self, url: str, keep: int, prefix: str = "slipstream") -> None:
        self._keep, self._prefix, self._url = keep, prefix, url
        try:
            # No retries: an append whose answer was lost must not be sent again by itself.
            pool = redis.BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=ANSWER_SECONDS,
                socket_connect_timeout=CONNECT_SECONDS,
                socket_timeout=ANSWER_SECONDS,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise HistoryStoreError(
                f"'{self._place()}' is no address of a Redis server ({error}); use "
                "redis://HOST:PORT/DB"
            ) from error
        self._client: Any = redis.Redis.from_pool(pool)  # its answers are bytes
        register = self._client.register_script
        self._append, self._read = register(scripts.APPEND), register(scripts.READ)
        self._delete = register(scripts.DELETE)
        self._tail, self._pack = register(scripts.READ_TAIL), register(scripts.PACK)
        self._checked = False
        self._clock_read_at, self._clock_ahead = -math.inf, 0.0

    async def append(
        self,
        user: str,
        history: History,
        after: int | None = None,
        now: float | None = None,
        seconds: float | None = None,
    ) -> int:
        """Add behaviours; see `HistoryStore.append`.

        Redis itself refuses what it comes to after the caller's time, such as when it hung.
        """
        check_user(user)
        checked = check_history(history, now)
        end = time.monotonic() + min(seconds or ANSWER_SECONDS, ANSWER_SECONDS)
        async with self._answering(end - time.monotonic()):
            await self._check_format()
            outcome = b"late"
            for again in (False, True):  # a clock that was put forward looks like lateness, once
                limit = await self._redis_time(end, again)
                number = "" if after is None else after
                call = self._append_call(user, checked, "append", number, limit)
                outcome, value, gathered = await self._append(**call)
                if outcome != b"late":
                    break
            else:
                raise exceptions.TimeoutError("it came to the append too late; nothing is stored")
        match outcome:
            case b"count":
                refuse_wrong_count(int(value), after)
            case b"kind":
                refuse_other_kind(value.decode(), checked)
            case b"time":
                refuse_going_back(int(value, 16) - INT64_SPAN, checked)
            case b"actions":
                refuse_many_actions(int(value))
        if gathered == b"1":
            with contextlib.suppress(HistoryStoreError):  # the behaviours are stored
                await self._pack_tail(user)
        return int(value)

    async def read(
        self, user: str, limit: int, since: int | None = None, seconds: float | None = None
    ) -> History | None:
        """Return the newest behaviours; see `HistoryStore.read`."""
        if not is_user(user):
            return None
        async with self._answering(seconds):
            await self._check_format()
            arguments = [limit, "" if since is None else since]
            call: dict[str, Any] = {"keys": self._keys(user)[:2], "args": arguments}
            try:
                found = await self._read(**call)
            except exceptions.ConnectionError:  # a server that was restarted; reads may be repeated
                await self._forget_connections()
                found = await self._read(**call)
        if found is None:
            return None
        begin, total, *members = found
        return merge_blocks(_numbered(members), int(begin), int(total))

    async def delete(self, user: str, seconds: float | None = None) -> int:
        """Forget a user; see `HistoryStore.delete`."""
        if not is_user(user):
            return 0
        async with self._answering(seconds):
            await self._check_format()
            return int(await self._delete(keys=self._keys(user), args=[user]))

    async def users(self, after: str | None = None, limit: int = 1000) -> list[str]:
        """Return users in order; see `HistoryStore.users`."""
        if after:
            check_user(after)
        async with self._answering():
            await self._check_format()
            begin = f"({after}" if after else "-"
            key = f"{self._prefix}:users"
            found = await self._client.zrangebylex(key, begin, "+", start=0, num=limit)
        return [user.decode() for user in found]

    async def import_histories(
        self, histories: Sequence[tuple[str, History]], replace: bool = False
    ) -> list[str]:
        """Store whole histories, each in one step; see `HistoryStore.import_histories`."""
        checked = check_histories(histories)
        async with self._answering():
            await self._check_format()
            return await self._import(checked, replace)

    async def check(self) -> None:
        """Check that the server answers and holds a store of this format."""
        async with self._answering():
            await self._client.ping()
            await self._check_format()

    async def migrate(self) -> int:
        """Move users of the earlier format; see `HistoryStore.migrate`. It may be repeated."""
        moved = 0
        async with self._answering():
            marker = f"{self._prefix}:actions"
            actions = await self._client.get(marker)
            if actions is None:
                return 0
            begin, end = f"{self._prefix}:h:{{".encode(), b"}"
            async for key in self._client.scan_iter(match=begin + b"*" + end, count=1000):
                user = key.removeprefix(begin).removesuffix(end)
                number = b"%s:f:{%s}" % (self._prefix.encode(), user)
                data, first = await self._client.mget(key, number)
                history = read_records(int(first or 0), data or b"", actions.decode())
                moved += len(await self._import([(user.decode(), history)], replace=False))
                await self._client.delete(key, number)
            await self._client.delete(marker)
        return moved

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    # ---- calls -----------------------------------------------------------------------------------

    async def _import(self, histories: list[tuple[str, History]], replace: bool) -> list[str]:
        pipeline = self._client.pipeline(transaction=False)
        for user, history in histories:
            call = self._append_call(user, history, "replace" if replace else "new", history.first)
            await self._append(**call, client=pipeline)
        answers = await pipeline.execute()
        answered = zip(answers, histories, strict=True)
        return [user for answer, (user, sent) in answered if answer[0] == b"ok" and len(sent)]

    async def _redis_time(self, moment: float, again: bool) -> int:
        """Return a moment of this process's monotonic clock in milliseconds of Redis' clock.

        Redis' clock is read now and then, and `again` where it is to be: never too late.
        """
        if again or time.monotonic() > self._clock_read_at + CLOCK_SECONDS:
            seconds, microseconds = await self._client.time()
            self._clock_read_at = time.monotonic()
            self._clock_ahead = seconds + microseconds / 1e6 - self._clock_read_at
        return int((moment + self._clock_ahead) * 1000)

    def _append_call(
        self, user: str, history: History, mode: str, number: int | str, limit: int | str = ""
    ) -> dict[str, Any]:
        """Return keys and arguments of the script that appends, up to a moment of Redis' clock."""
        earliest, latest = ("", "")
        if len(history):
            earliest, latest = (_ordered(int(history.timestamps[place])) for place in (0, -1))
        arguments: list[bytes | str | int] = [
            *(user, mode, number, earliest, latest, id_kind(history.items), secrets.token_hex(8))
        ]
        names = sorted(names_of([history]))
        arguments += [self._keep, MAX_ACTIONS, TAIL, limit, len(names), *names]
        for _, count, data in cut_blocks(history):
            arguments += [count, data]
        return {"keys": self._keys(user), "args": arguments}

    async def _pack_tail(self, user: str) -> None:
        """Rewrite the blocks that gathered since the last packing as few larger ones."""
        keys = self._keys(user)[:2]
        async with self._answering():
            found = await self._tail(keys=keys)
            if found is None or len(found) < 5:
                return
            born, packings, packed, total, *members = found
            whole = merge_blocks(_numbered(members), int(packed), int(total))
            written = list(cut_blocks(whole))
            full = written[-1][1] == CHUNK
            arguments: list[bytes | str | int] = [
                *(born, packings, packed, whole.total, whole.total if full else written[-1][0])
            ]
            for first, _, data in written:
                arguments += [first, data]
            await self._pack(keys=keys, args=arguments)

    async def _check_format(self) -> None:
        """Check once per process that the store has this format, and mark a new one."""
        if self._checked:
            return
        if await self._client.exists(f"{self._prefix}:actions"):
            raise HistoryStoreError(
                f"the history store at {self._place()} has the earlier format; stop its servers "
                f"and run: slipstream history migrate --history {self._place()}"
            )
        key = f"{self._prefix}:format"
        await self._client.set(key, FORMAT, nx=True)
        stored = await self._client.get(key)
        if stored != FORMAT.encode():
            raise HistoryStoreError(
                f"the history store at {self._place()} has a format that this version does not "
                "know; install a later slipstream"
            )
        self._checked = True

    @contextlib.asynccontextmanager
    async def _answering(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Turn a failure of Redis or of the network, or its silence, into a `HistoryStoreError`."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except (exceptions.RedisError, OSError) as error:
            await self._forget_connections()
            why = str(error) or "in time"
            raise HistoryStoreError(
                f"the history store at {self._place()} does not answer ({why}); "
                "check that the server runs, is writable and has memory left",
                temporary=True,
            ) from error

    async def _forget_connections(self) -> None:
        """Close the idle connections: where one has failed, the others are of the same server."""
        with contextlib.suppress(exceptions.RedisError, OSError):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    def _keys(self, user: str) -> list[str]:
        prefix = self._prefix
        return [f"{prefix}:history:{user}", f"{prefix}:blocks:{user}", f"{prefix}:users"]

    def _place(self) -> str:
        return url_without_password(self._url)


def _ordered(time: int) -> str:
    """Return a time as text that Redis compares as it compares numbers, negative ones too."""
    return f"{time + INT64_SPAN:016x}"


def _numbered(members: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Return (first number, block) of the members of a sorted set, which are `number:block`."""
    split = (member.partition(b":") for member in members)
    return [(int(first), data) for first, _, data in split]
