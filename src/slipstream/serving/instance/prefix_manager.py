"""The prefixes of an instance: where one is found, how one is made, when one goes to the host tier.

A prefix is taken from the first of these that has it: the device cache, a prefix in flight, a
shorter prefix in the cache, a shorter one in flight, the host tier, a prefill. All bookkeeping
happens on the event loop; the compute thread runs steps and touches nothing but the buffers it was
given. Touch this when prefixes are looked for in another order, or kept in another place.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.serving.cache.expander import Expander, HostLease
from slipstream.serving.cache.inflight import InflightPrefix, InflightPrefixes, PrefixRequest
from slipstream.serving.cache.prefix_cache import Busy, Lease, PrefixCache
from slipstream.serving.cache.prefix_memory import PREFIX_MEMORY, PrefixMemory
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import Prefix, PrefixKey
from slipstream.serving.instance.estimates import RequestEstimates
from slipstream.serving.instance.host_copies import HostCopies
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


@dataclass(frozen=True)
class ReadyHistory:
    """What a request is scored behind: a held prefix or none, and the behaviours after it.

    `fills` is the prefix that scoring computes and leaves in the cache, in the same pass.
    """

    held: HeldPrefix | None
    new: EncodedHistory
    hit: Hit
    truncated: bool
    fills: InflightPrefix | None = None


log = logging.getLogger("slipstream.serving")


class PrefixManager:
    """The tiers of prefixes of one engine, and the jobs that fill them."""

    def __init__(
        self,
        engine: Engine,
        config: InstanceConfig,
        estimates: RequestEstimates,
        jobs: JobRunner,
        memory: PrefixMemory = PREFIX_MEMORY,
    ) -> None:
        self.engine, self.config, self.estimates, self.jobs = engine, config, estimates, jobs
        self.clock = jobs.clock
        device_bytes = config.device_bytes if config.relay else 64
        self.cache = PrefixCache(
            engine.shape,
            device_bytes,
            pin_share=config.trigger.memory_share,
            max_pin_seconds=config.max_pin,
            clock=self.clock,
            arena=memory.arena(device_bytes),
        )
        self.expander: Expander | None = None
        if config.relay and config.host_path is not None and config.host_bytes:
            self.expander = _open_expander(engine, config, memory)
        self.inflight = InflightPrefixes(engine, self.cache, self.expander, estimates.cost)
        self.counts: Counter[str] = Counter()
        self.outstanding_behaviours = 0  # of prefixes being filled
        self.copies = HostCopies(self.cache, self.expander, jobs, config.max_copies, self.counts)

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
        if queued and self.clock.now() + needed / OPTIMISM > deadline:
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
        # A pin is for the ranking that a pre-inference announced meanwhile, not for this one.
        lease = self.cache.acquire(request.key, keep_pin=True)
        return lease, sources.get(inflight.source, "inline")

    async def compute_private(self, request: PrefixRequest, deadline: float) -> PrivatePrefix:
        """Compute a prefix in memory of its own."""
        tokens = self.engine.cached_tokens(len(request.encoded))
        cost = self.estimates.cost

        def steps() -> Generator[int, None, Prefix]:
            buffer = self.engine.shape.buffer(tokens)
            chunk = cost.chunk_for(tokens)
            yield from self.engine.prefill_steps(request.encoded, buffer, None, chunk)
            return self.engine.prefix_of(request.encoded, buffer, request.key.digest)

        seconds = cost.prefill_seconds(tokens)
        return PrivatePrefix(await self.jobs.run(deadline, seconds, steps=steps()))

    def submit(
        self, inflight: InflightPrefix, kind: Kind, deadline: float, pinned_until: float | None
    ) -> None:
        """Queue the steps of a started prefix; it is published, or removed, when they end."""
        self._begin(inflight, kind, pinned_until)

        def on_done(_: Any, error: BaseException | None) -> None:
            if error is None and inflight.source == "computed":
                self.estimates.cost.observe("prefill", inflight.seconds, inflight.job.spent)
            self._end(inflight, error)

        try:
            inflight.job = self.jobs.submit(
                kind,
                deadline,
                inflight.seconds,
                on_done,
                steps=self.inflight.steps(inflight),
                extra_seconds=self.config.ranking_budget if kind == Kind.PREINFER else 0.0,
            )
        except OverloadError as error:
            self._end(inflight, error)
            raise

    def begin_fill(self, request: PrefixRequest) -> InflightPrefix | None:
        """Reserve a prefix that a ranking of the whole history fills in its own pass.

        None where the cache has no room. `end_fill` must follow.
        """
        inflight = self.inflight.start(request)
        if isinstance(inflight, Busy):
            return None
        self._begin(inflight, Kind.RANK, None)
        return inflight

    def end_fill(self, inflight: InflightPrefix, error: BaseException | None) -> None:
        """Publish a prefix that a ranking has filled, and demote it; remove it after an error."""
        self._end(inflight, error)
        if error is None:
            self.release(self.cache.acquire(inflight.request.key, keep_pin=True))

    def _begin(self, inflight: InflightPrefix, kind: Kind, pinned_until: float | None) -> None:
        """Let requests wait for a prefix."""
        self.outstanding_behaviours += len(inflight.request.encoded)
        inflight.kind, inflight.pinned_until = kind, pinned_until
        inflight.done = asyncio.get_running_loop().create_future()

    def _end(self, inflight: InflightPrefix, error: BaseException | None) -> None:
        """Publish a prefix or remove it, and tell those who wait for it."""
        self.outstanding_behaviours -= len(inflight.request.encoded)
        if error is None:
            from_host = isinstance(inflight.base, HostLease)
            self.copies.note_filled(inflight.request.key.user, from_host=from_host)
            self.inflight.finish(inflight, inflight.pinned_until)
        else:
            self.inflight.fail(inflight)
        if not inflight.done.done():
            inflight.done.set_result(error)

    def release(self, held: HeldPrefix | None) -> None:
        """End the lease of a prefix that a ranking has used; it goes to the host tier in time."""
        if held is not None:
            held.release()
        if isinstance(held, Lease):
            self.copies.note_used(held.slot.key)

    def forget(self, user: str) -> bool:
        """Remove a user's prefixes from both tiers; False where some are still in use."""
        self.copies.forget(user)
        filling = any(key.user == user for key in self.inflight.by_key)
        left = self.cache.forget(user)
        if self.expander is not None:
            left += self.expander.forget(user)
        return not filling and not left

    def close(self) -> None:
        """Close the host tier; what is in it stays for the next process."""
        self.copies.stop()
        if self.expander is not None:
            self.expander.close()

    async def _wait(self, inflight: InflightPrefix, deadline: float) -> None:
        """Wait until a prefix is filled or has failed, no longer than the deadline."""
        timeout = max(0.0, deadline - self.clock.now())
        done, _ = await asyncio.wait([inflight.done], timeout=timeout)
        if not done:
            raise DeadlineError("the deadline passed while the history was being computed")


def _open_expander(engine: Engine, config: InstanceConfig, memory: PrefixMemory) -> Expander | None:
    """Open the host tier; None, and a line in the log, where shared memory cannot be had."""
    assert config.host_path is not None
    try:
        return Expander(engine, config.host_path, config.host_bytes, memory.open_shelf)
    except SlipstreamError as error:
        log.warning("no host tier: %s", error)
        return None
