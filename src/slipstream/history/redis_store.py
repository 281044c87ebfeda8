"""Histories in Redis, for instances on several machines: one string of records per user.

Touch this when the keys in Redis or the scripts that run there change.

    {prefix}:h:{user}   records, oldest first
    {prefix}:f:{user}   number of the oldest record kept
    {prefix}:actions    the actions this store was made for

A script runs inside Redis, so that check, append and trim are one step for every client. It
compares times as hexadecimal text: Redis' numbers are doubles and would round an int64.
"""

import redis.asyncio as redis
from redis import exceptions

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import (
    Records,
    refuse_going_back,
    refuse_other_actions,
    refuse_wrong_count,
)
from slipstream.history.user_history import History

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
INT64_MAX = 2**63 - 1

APPEND = """
local width, keep = tonumber(ARGV[2]), tonumber(ARGV[3])
local first = tonumber(redis.call('GET', KEYS[2]) or '0')
local length = redis.call('STRLEN', KEYS[1])
local total = first + length / width
if ARGV[4] ~= '' and tonumber(ARGV[4]) ~= total then return {'count', tostring(total)} end
if length > 0 then
  local time = redis.call('GETRANGE', KEYS[1], length - width + 8, length - width + 15)
  time = string.reverse(time)
  time = string.gsub(time, '.', function(byte) return string.format('%02x', string.byte(byte)) end)
  if ARGV[5] < time then return {'time', time} end
end
redis.call('APPEND', KEYS[1], ARGV[1])
length = length + #ARGV[1]
total = first + length / width
if length / width > 2 * keep then
  redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], length - keep * width, -1))
  redis.call('SET', KEYS[2], string.format('%d', total - keep))
end
return {'ok', string.format('%d', total)}
"""

READ = """
local width, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local first = tonumber(redis.call('GET', KEYS[2]) or '0')
local length = redis.call('STRLEN', KEYS[1])
if length == 0 then return false end
local kept = length / width
local begin = kept - limit
if ARGV[3] ~= '' then begin = tonumber(ARGV[3]) - first end
if begin < 0 then begin = 0 end
return {string.format('%d', first + begin), redis.call('GETRANGE', KEYS[1], begin * width, -1)}
"""


class RedisHistoryStore:
    """A history store on a Redis server."""

    def __init__(self, url: str, records: Records, keep: int, prefix: str = "slipstream") -> None:
        self.records, self._keep, self._prefix, self._url = records, keep, prefix, url
        self._client = redis.Redis.from_url(
            url, socket_connect_timeout=CONNECT_SECONDS, socket_timeout=ANSWER_SECONDS
        )
        self._append, self._read = (
            self._client.register_script(APPEND),
            self._client.register_script(READ),
        )
        self._checked = False

    async def append(self, user: str, history: History, after: int | None = None) -> int:
        """Add behaviours; see `HistoryStore.append`."""
        data = self.records.pack(history)
        await self._check()
        earliest = f"{int(history.timestamps[0]) if len(history.timestamps) else INT64_MAX:016x}"
        arguments: list[bytes | str | int] = [
            data,
            self.records.width,
            self._keep,
            "" if after is None else after,
            earliest,
        ]
        outcome, value = await self._append(keys=self._keys(user), args=arguments)
        if outcome == b"count":
            refuse_wrong_count(int(float(value)), after)
        if outcome == b"time":
            refuse_going_back(int(value, 16), history)
        return int(value)

    async def read(self, user: str, limit: int, since: int | None = None) -> History | None:
        """Return the newest behaviours; see `HistoryStore.read`."""
        await self._check()
        found = await self._read(
            keys=self._keys(user), args=[self.records.width, limit, "" if since is None else since]
        )
        return None if found is None else self.records.unpack(int(found[0]), found[1])

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _check(self) -> None:
        """Check once per process that the store answers and was made for these actions."""
        if self._checked:
            return
        mine, key = "\x1f".join(self.records.actions), f"{self._prefix}:actions"
        try:
            await self._client.set(key, mine, nx=True)
            stored = await self._client.get(key)
        except exceptions.RedisError as error:
            raise SlipstreamError(
                f"the history store at {self._place()} does not answer ({error}); start it or "
                "give another"
            ) from error
        refuse_other_actions(
            self._place(),
            stored.decode() if isinstance(stored, bytes) else stored or "",
            self.records,
        )
        self._checked = True

    def _keys(self, user: str) -> list[str]:
        # The braces make both keys live on one node of a Redis cluster.
        return [f"{self._prefix}:h:{{{user}}}", f"{self._prefix}:f:{{{user}}}"]

    def _place(self) -> str:
        """Return the URL without its password."""
        return self._url.rsplit("@", 1)[-1]
