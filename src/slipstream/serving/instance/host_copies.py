"""When used prefixes are copied to the host tier: before the device tier needs their room.

A copy takes time of the cores, and most prefixes are replaced by a longer one of the same user
before their room is needed. So nothing is copied while the device tier has much room and requests
come; the prefix used least recently goes first. Where room is scarce, copies must pay: users whose
prefix left without a copy are remembered, and how many of them come back tells what share of the
copies would be read again. An instance without requests for a second copies all it has, and so does
one that drains: the next process finds them. The host tier takes new memory in the background, at a
bounded pace: until it is there, copies wait. Touch this when prefixes are copied at another moment.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from typing import Any

from slipstream.serving.cache.expander import Expander
from slipstream.serving.cache.prefix_cache import Lease, PrefixCache
from slipstream.serving.engine.prefix import Prefix, PrefixKey
from slipstream.serving.instance.job_runner import JobRunner
from slipstream.serving.instance.scheduler import Kind
from slipstream.serving.request_errors import OverloadError

ROOM_SHARE = 0.25  # of the device tier: nothing is copied under load while so much is free
MOST_GONE = 4_096  # users whose prefix left without a copy that are remembered
FIRST_CHANCES = 2.0  # copies that are expected to be read, until something else is seen
REMEMBERED = 512.0  # copies and evictions over which the share of those read again is taken
GROWTH_BYTES = 4 << 20  # by which the host tier takes memory
GROWTH_REST = 4.0  # times as long as that took, nothing is taken
IDLE_SECONDS = 1.0  # without a used prefix; then all are copied


class HostCopies:
    """Copies from the device tier to the host tier, by the compute thread where it is free."""

    def __init__(
        self,
        cache: PrefixCache,
        expander: Expander | None,
        jobs: JobRunner,
        most: int,
        counts: Counter[str],
    ) -> None:
        self.cache, self.expander, self.jobs = cache, expander, jobs
        self.most, self.counts = most, counts
        self.underway = 0
        self.finishing = False  # copy everything: the process ends
        self._growth: asyncio.Task[None] | None = None
        # Used prefixes that the host tier lacks; the one used least recently is the first.
        self._waiting: OrderedDict[PrefixKey, None] = OrderedDict()
        # Users whose prefix left without a copy; what share of all that left would have been read.
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._chances = self._read_again = FIRST_CHANCES
        cache.on_evicted = self._note_evicted
        self._last_used = -math.inf
        self._timer: Any = None

    def __len__(self) -> int:
        """Copies not finished, begun or not."""
        return self.underway + len(self._waiting)

    def note_used(self, key: PrefixKey) -> None:
        """Note that a request has used a prefix: the host tier shall have it in time."""
        self._last_used = self.jobs.clock.now()
        if self.expander is None or self.expander.has(key):
            return
        self._waiting[key] = None
        self._waiting.move_to_end(key)
        if len(self._waiting) > 2 * len(self.cache) + 64:  # prefixes may have gone meanwhile
            for gone in [each for each in self._waiting if not self.cache.has(each)]:
                del self._waiting[gone]
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(IDLE_SECONDS, self._look_again)
        self._copy_due()

    def note_filled(self, user: str, *, from_host: bool) -> None:
        """Note that a prefix had to be filled: from the host tier, or for want of a copy there."""
        self._read_again += from_host
        if user in self._gone:
            del self._gone[user]
            self._read_again += not from_host

    def forget(self, user: str) -> None:
        """Forget a user."""
        self._gone.pop(user, None)

    def _note_evicted(self, key: PrefixKey) -> None:
        """Note that the device tier has given a prefix up."""
        if key in self._waiting:
            del self._waiting[key]
            self._note_chance()
            self._gone[key.user] = None
            self._gone.move_to_end(key.user)
            if len(self._gone) > MOST_GONE:
                self._gone.popitem(last=False)

    def _note_chance(self) -> None:
        """Count a prefix that was copied or could have been; older ones fade."""
        fade = 1.0 - 1.0 / REMEMBERED
        self._chances, self._read_again = fade * self._chances + 1.0, fade * self._read_again

    def _pays(self, prefix: Prefix) -> bool:
        """Return whether a copy is expected to save more time than it takes, and its reading."""
        copy = self.jobs.cost.copy_seconds(prefix.nbytes)
        saved = self.jobs.cost.prefill_seconds(prefix.tokens) - copy
        return self._read_again * saved > self._chances * copy

    def _look_again(self) -> None:
        """Copy what waits where no request came for a while, else look again later."""
        self._timer = None
        if not self._waiting or self.finishing:
            return
        since = self.jobs.clock.now() - self._last_used
        if since < IDLE_SECONDS:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(IDLE_SECONDS - since + 0.001, self._look_again)
        self._copy_due()

    async def finish(self, seconds: float) -> None:
        """Copy everything within so many seconds: the process will end."""
        self.finishing = True
        self._copy_due()
        end = self.jobs.clock.now() + seconds
        while len(self) and self.jobs.clock.now() < end:
            await asyncio.sleep(0.005)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()

    def _is_due(self, prefix: Prefix) -> bool:
        """Return whether to copy now: nobody asks, the process ends, or room is scarce."""
        if self.finishing or self.jobs.clock.now() - self._last_used >= IDLE_SECONDS:
            return True
        scarce = self.cache.used > (1.0 - ROOM_SHARE) * self.cache.budget
        return scarce and self._pays(prefix)

    def _copy_due(self) -> None:
        while self._waiting and self.underway < self.most:
            key = next(iter(self._waiting))
            lease = self.cache.lease(key)
            if lease is None:
                del self._waiting[key]
                continue
            with lease:
                if not (self._is_due(lease.prefix) and self._has_memory(lease.prefix.tokens)):
                    return
                del self._waiting[key]
                self._copy(lease)

    def _has_memory(self, tokens: int) -> bool:
        """Return whether the host tier need not grow for a prefix; else have it grow."""
        assert self.expander is not None
        if self._growth is not None:
            return False
        nbytes = self.expander.engine.shape.nbytes(tokens)
        missing = self.expander.shelf.missing_bytes(nbytes, GROWTH_BYTES)
        if missing:
            self._growth = asyncio.ensure_future(self._grow(missing))
        return not missing

    async def _grow(self, nbytes: int) -> None:
        assert self.expander is not None
        begin = self.jobs.clock.now()
        await self.expander.shelf.grow(nbytes)
        if not self.finishing:
            await asyncio.sleep(GROWTH_REST * (self.jobs.clock.now() - begin))
        self._growth = None
        self._copy_due()

    def _copy(self, lease: Lease) -> None:
        """Queue the copy of one prefix."""
        expander = self.expander
        assert expander is not None
        demotion = expander.begin(lease.slot.key, lease.prefix)
        if demotion is None:
            return
        copied = Lease(lease.slot)
        self.underway += 1
        self._note_chance()

        def on_done(_: Any, error: BaseException | None) -> None:
            copied.release()
            self.underway -= 1
            if error is None:
                expander.finish(demotion)
                self.counts["demoted"] += 1
                self._copy_due()
            else:
                expander.cancel(demotion)

        seconds = self.jobs.cost.copy_seconds(lease.prefix.nbytes)
        try:
            self.jobs.submit(Kind.COPY, math.inf, seconds, on_done, steps=demotion.steps())
        except OverloadError as error:
            on_done(None, error)
