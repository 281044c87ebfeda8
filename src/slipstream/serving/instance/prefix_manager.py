"""The prefixes of an instance: where one is found, how one is made, when one goes to the host tier.

A prefix is taken from the first of these that has it: the device cache, a prefix in flight, a
shorter prefix in the cache, a shorter one in flight, the host tier, a prefill. All bookkeeping
happens on the event loop; the compute thread runs steps and touches nothing but the buffers it was
given. Touch this when prefixes are looked for in another order, or kept in another place.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from slipstream.serving.cache.expander import Expander
from slipstream.serving.cache.inflight import InflightPrefix, InflightPrefixes, PrefixRequest
from slipstream.serving.cache.prefix_cache import Busy, Lease, PrefixCache
from slipstream.serving.engine.engine import SUFFIX_ROOM, Engine
from slipstream.serving.engine.prefix import Prefix, PrefixBuffer, PrefixKey
from slipstream.serving.instance.estimates import RequestEstimates
from slipstream.serving.instance.instance_config import Hit, InstanceConfig
from slipstream.serving.instance.job_runner import JobRunner
from slipstream.serving.instance.scheduler import Kind
from slipstream.serving.instance.trigger import OPTIMISM
from slipstream.serving.request_errors import DeadlineError, OverloadError


@dataclass(frozen=True)
class PrivatePrefix:
    """A prefix in memory of its own, for a request that found no room in the cache."""

    prefix: Prefix

    def release(self) -> None:
        """Do nothing: the memory goes with the object."""


HeldPrefix = Lease | PrivatePrefix


class PrefixManager:
    """The tiers of prefixes of one engine, and the jobs that fill them."""

    def __init__(
        self, engine: Engine, config: InstanceConfig, estimates: RequestEstimates, jobs: JobRunner
    ) -> None:
        self.engine, self.config, self.estimates, self.jobs = engine, config, estimates, jobs
        self.cache = PrefixCache(engine.shape, config.device_bytes if config.relay else 64)
        self.expander: Expander | None = None
        if config.relay and config.host_path is not None and config.host_bytes:
            self.expander = Expander(engine, config.host_path, config.host_bytes)
        self.inflight = InflightPrefixes(engine, self.cache, self.expander, estimates.cost)
        self.counts: Counter[str] = Counter()
        self.outstanding_tokens = 0  # of prefixes being filled
        self.demotions = 0  # copies to the host tier not finished yet

    def pin(self, request: PrefixRequest, until: float) -> tuple[str, PrefixKey] | None:
        """Keep a prefix that will serve this request as it is, or that is being filled.

        Returns where it is and its key; None where there is no such prefix.
        """
        slot = self.inflight.find_shorter_slot(request, self.config.max_tail)
        inflight = self.inflight.by_key.get(request.key)
        if inflight is None and slot is None:
            inflight = self.inflight.find_shorter(request, self.config.max_tail)
        if inflight is not None:
            inflight.pinned_until = max(until, inflight.pinned_until or 0.0)
            return "joined", inflight.request.key
        if slot is None:
            return None
        self.cache.pin(slot, until)
        return ("device" if slot.key == request.key else "extended"), slot.key

    async def find(
        self, request: PrefixRequest, candidates: int, deadline: float
    ) -> tuple[HeldPrefix | None, Hit | None]:
        """Lease a prefix that is ready, or wait for one that is being filled.

        Without a lease the second value is "inline", or None where one is being filled but would
        come too late.
        """
        inflight = self.inflight.find(request)
        if isinstance(inflight, Lease):
            return inflight, "device"
        if inflight is None:
            lease = self.inflight.acquire_shorter(request, self.config.max_tail)
            if lease is not None:
                return lease, "extended"
            inflight = self.inflight.find_shorter(request, self.config.max_tail)
        if inflight is None:
            return None, "inline"
        self.counts["late"] += inflight.kind == Kind.PREINFER
        queued = self.jobs.scheduler.backlog(deadline)
        tokens = self.engine.cached_tokens(len(request.encoded))
        needed = queued + inflight.job.remaining + self.estimates.rank_seconds(tokens, candidates)
        if queued and time.monotonic() + needed / OPTIMISM > deadline:
            return None, None
        self.jobs.scheduler.hurry(inflight.job, Kind.RANK, deadline)
        await self._wait(inflight, deadline)
        lease = self.cache.acquire(inflight.request.key)
        return (lease, "joined") if lease is not None else (None, "inline")

    async def compute(
        self, request: PrefixRequest, deadline: float
    ) -> tuple[HeldPrefix | None, Hit]:
        """Fill a prefix now, from what the tiers hold; where the cache has no room, outside it."""
        inflight = self.inflight.start(request)
        if isinstance(inflight, Busy):
            return await self.compute_private(request, deadline), "inline"
        self.submit(inflight, Kind.RANK, deadline, None)
        await self._wait(inflight, deadline)
        sources: dict[str, Hit] = {"host": "host", "extended": "extended"}
        return self.cache.acquire(request.key), sources.get(inflight.source, "inline")

    async def compute_private(self, request: PrefixRequest, deadline: float) -> PrivatePrefix:
        """Compute a prefix in memory of its own."""
        tokens = self.engine.cached_tokens(len(request.encoded))
        cost = self.estimates.cost

        def steps() -> Generator[int, None, Prefix]:
            buffer = PrefixBuffer(self.engine.shape, tokens + SUFFIX_ROOM)
            chunk = cost.chunk_for(tokens)
            yield from self.engine.prefill_steps(request.encoded, buffer, None, chunk)
            return self.engine.prefix_of(request.encoded, buffer, request.key.digest)

        seconds = cost.prefill_seconds(tokens)
        return PrivatePrefix(await self.jobs.run(deadline, seconds, steps=steps()))

    def submit(
        self, inflight: InflightPrefix, kind: Kind, deadline: float, pinned_until: float | None
    ) -> None:
        """Queue the steps of a started prefix; it is published, or removed, when they end."""
        tokens = self.engine.cached_tokens(len(inflight.request.encoded))
        done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        inflight.kind, inflight.done, inflight.pinned_until = kind, done, pinned_until

        def on_done(_: Any, error: BaseException | None) -> None:
            self.outstanding_tokens -= tokens
            if error is None:
                pin = inflight.pinned_until if kind == Kind.PREINFER else None
                self.inflight.finish(inflight, pin)
                if inflight.source == "computed":
                    self.estimates.cost.observe("prefill", inflight.seconds, inflight.job.spent)
            else:
                self.inflight.fail(inflight)
            if not done.done():
                done.set_result(error)

        try:
            inflight.job = self.jobs.submit(
                kind,
                deadline,
                inflight.seconds,
                on_done,
                steps=self.inflight.steps(inflight),
                extra_seconds=self.config.ranking_budget if kind == Kind.PREINFER else 0.0,
            )
        except OverloadError:
            self.inflight.fail(inflight)
            raise
        self.outstanding_tokens += tokens

    def release(self, held: HeldPrefix | None) -> None:
        """Demote a prefix that a ranking has used, and end its lease."""
        if isinstance(held, Lease):
            self._demote(held)
        if held is not None:
            held.release()

    def forget(self, user: str) -> bool:
        """Remove a user's prefixes from both tiers; False where some are still in use."""
        filling = any(key.user == user for key in self.inflight.by_key)
        left = self.cache.forget(user)
        if self.expander is not None:
            left += self.expander.forget(user)
        return not filling and not left

    def close(self) -> None:
        """Close the host tier; what is in it stays for the next process."""
        if self.expander is not None:
            self.expander.close()

    async def _wait(self, inflight: InflightPrefix, deadline: float) -> None:
        """Wait until a prefix is filled or has failed, no longer than the deadline."""
        timeout = max(0.0, deadline - time.monotonic())
        done, _ = await asyncio.wait([inflight.done], timeout=timeout)
        if not done:
            raise DeadlineError("the deadline passed while the history was being computed")

    def _demote(self, lease: Lease) -> None:
        """Copy a prefix to the host tier, when the compute thread has nothing else to do."""
        expander, key = self.expander, lease.slot.key
        if expander is None or self.demotions >= self.config.max_copies or expander.has(key):
            return
        demotion = expander.begin(key, lease.prefix)
        if demotion is None:
            return
        copied = Lease(lease.slot)
        self.demotions += 1

        def on_done(_: Any, error: BaseException | None) -> None:
            copied.release()
            self.demotions -= 1
            if error is None:
                expander.finish(demotion)
                self.counts["demoted"] += 1
            else:
                expander.cancel(demotion)

        seconds = self.estimates.cost.copy_seconds(lease.prefix.nbytes)
        try:
            self.jobs.submit(Kind.COPY, math.inf, seconds, on_done, steps=demotion.steps())
        except OverloadError as error:
            on_done(None, error)
