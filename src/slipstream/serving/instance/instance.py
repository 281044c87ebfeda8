"""An instance: one engine with its scheduler, prefix cache, trigger and expander. What the apps
serve, without HTTP.

    instance = Instance("bundles/ml-1m", InstanceConfig(host_path="/dev/shm/slipstream-0"))
    await instance.preinfer("user 42", history, rank_in=0.1)                    # returns at once;
                                                                                computing goes on
    answer = await instance.rank("user 42", history, candidates, recent=None,
    deadline=time.monotonic() + 0.08)

All bookkeeping (cache, flights, trigger) happens on the event loop that calls it; the compute
thread runs steps and touches nothing but buffers it was given. A buffer stays held until the job
that uses it has ended, whatever became of the request.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.bundle import Bundle
from slipstream.serving.cache.expander import Expander
from slipstream.serving.cache.inflight import InflightPrefix, InflightPrefixes, PrefixRequest
from slipstream.serving.cache.prefix_cache import Busy, Lease, PrefixCache
from slipstream.serving.engine.engine import SUFFIX_ROOM, Behaviours, Engine, RankQuery
from slipstream.serving.engine.items import Encoded
from slipstream.serving.engine.prefix import Prefix, PrefixBuffer, PrefixKey
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.figures import figures
from slipstream.serving.instance.instance_config import Admission, InstanceConfig, RankAnswer
from slipstream.serving.instance.instance_load import (
    PrivatePrefix,
    RecentWaits,
    called_on,
    keep_newest,
    window_start,
)
from slipstream.serving.instance.scheduler import Job, Kind, Scheduler
from slipstream.serving.instance.trigger import ADMITTED, HOPE, Prospect, Trigger
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError

__all__ = [
    "Admission",
    "BadRequest",
    "DeadlineError",
    "Instance",
    "InstanceConfig",
    "OverloadError",
    "RankAnswer",
]


class Instance:
    """See the module."""

    def __init__(
        self,
        bundle: str | Path | Bundle,
        config: InstanceConfig | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.config = config or InstanceConfig()
        torch.set_num_threads(self.config.threads)
        self.engine = Engine(bundle)
        self.cost = cost or CostModel.measure(self.engine, seconds=self.config.calibrate_seconds)
        self.cost.layers, self.cost.slice_seconds = (
            self.engine.shape.layers,
            self.config.slice_seconds,
        )
        self.cache = PrefixCache(
            self.engine.shape, self.config.device_bytes if self.config.relay else 64
        )
        self.expander: Expander | None = None
        if self.config.relay and self.config.host_path is not None and self.config.host_bytes:
            self.expander = Expander(self.engine, self.config.host_path, self.config.host_bytes)
        self.flights = InflightPrefixes(self.engine, self.cache, self.expander, self.cost)
        self.trigger = Trigger(self.config.trigger, time.monotonic())
        self.scheduler = Scheduler(
            self._run_questions,
            self._questions_seconds,
            max_jobs=self.config.max_jobs,
            max_batch=self.config.max_batch,
        )
        self.scheduler.start()
        self.counts: Counter[str] = Counter()
        self._announced: dict[
            PrefixKey, float
        ] = {}  # when a prefix was admitted, until it is consumed
        self._waits = RecentWaits()
        self.ranking = self.outstanding_tokens = self._copies = 0
        self.draining = False

    @property
    def version(self) -> str:
        return self.engine.version

    @property
    def backlog(self) -> int:
        """Tokens of prefixes still to be computed."""
        return self.outstanding_tokens

    # ---- pre-inference ---------------------------------------------------------------------------

    async def preinfer(
        self, user: str, history: Behaviours, *, rank_in: float | None = None
    ) -> Admission:
        """The signal that this user will be ranked soon. Decides at once; an admitted prefix is
        computed in the background.
        """
        now = time.monotonic()
        self._expire(now)
        rank_in = self.config.rank_in if rank_in is None else max(0.0, rank_in)
        encoded = self._window(self.engine.encode(history))
        tokens = self.engine.cached_tokens(len(encoded))
        for reason, met in (
            ("draining", self.draining),
            ("disabled", not (self.config.relay and self.config.preinfer)),
            ("too_short", not self._worth(tokens)),
        ):
            if met:
                return self._refused(reason, tokens)
        wanted = PrefixRequest(self.engine, user, encoded)
        until = now + rank_in + self.config.pin_grace
        kept = self._keep(wanted, until)
        if kept is not None:
            self._announced.setdefault(kept[1], now)
            return Admission(True, kept[0], kept[1], tokens)
        reason = self.trigger.decide(self._prospect(wanted, tokens, rank_in, now), now)
        if reason != ADMITTED:
            return self._refused(reason, tokens)
        flight = self.flights.start(wanted)
        if isinstance(flight, Busy):
            return self._refused(flight.reason, tokens)
        try:
            self._fly(flight, Kind.PREINFER, now + rank_in, until)
        except OverloadError as error:
            self.flights.fail(flight)
            return self._refused(error.reason, tokens)
        self._announced[wanted.key] = now
        self.counts["preinfer_admitted"] += 1
        return Admission(True, ADMITTED, wanted.key, tokens)

    def _keep(self, wanted: PrefixRequest, until: float) -> tuple[str, PrefixKey] | None:
        """A prefix that will serve this user as it is (or is on its way) needs only to stay."""
        slot = self.flights.find_shorter_slot(wanted, self.config.max_tail)
        flight = self.flights.by_key.get(wanted.key)
        if flight is None and slot is None:
            flight = self.flights.find_shorter(wanted, self.config.max_tail)
        if flight is not None:
            flight.pinned_until = max(until, flight.pinned_until or 0.0)
            return "joined", flight.request.key
        if slot is None:
            return None
        self.cache.pin(slot, until)
        return ("device" if slot.key == wanted.key else "extended"), slot.key

    def _prospect(self, wanted: PrefixRequest, tokens: int, rank_in: float, now: float) -> Prospect:
        rank = self._rank_seconds(tokens, self.engine.hold, self.config.expected_candidates)
        inline = self.cost.prefill_seconds(tokens) + rank
        return Prospect(
            inline_tail=self.cost.tail_seconds(inline, "prefill") + self._waits.tail(now),
            prefill=self.flights.estimate(wanted),
            queued=self.scheduler.backlog(now + rank_in, Kind.PREINFER),
            nbytes=self.engine.prefix_bytes(len(wanted.encoded)),
            pinned=self.cache.pinned,
            capacity=self.cache.budget,
            rank=self.cost.tail_seconds(rank),
            rank_in=rank_in,
            budget=self.config.ranking_budget,
        )

    def _refused(self, reason: str, tokens: int) -> Admission:
        self.counts[f"refused_{reason}"] += 1
        return Admission(False, reason, None, tokens)

    # ---- ranking ---------------------------------------------------------------------------------

    async def rank(
        self,
        user: str,
        history: Behaviours,
        candidates: Any,
        *,
        recent: Behaviours | None = None,
        deadline: float,
        allow_truncate: bool = False,
        request_time: int | None = None,
    ) -> RankAnswer:
        """Exact scores of the candidates after history + recent, from the best prefix there is;
        `deadline` is monotonic time.
        """
        now = time.monotonic()
        if now >= deadline:
            self.counts["deadline_passed"] += 1
            raise DeadlineError("the deadline had passed when the request arrived")
        if len(candidates) > self.config.max_candidates:
            raise BadRequest(
                f"{len(candidates)} candidates are more than the {self.config.max_candidates} one "
                "request may have"
            )
        rows = self.engine.items.rows(candidates)
        encoded, later = self.engine.encode(history), self.engine.encode(recent)
        encoded, later = self._windows(encoded, later)
        self._expire(now)
        self.ranking += 1
        try:
            return await self._rank(
                user, encoded, later, rows, deadline, allow_truncate, request_time
            )
        except DeadlineError:
            self.counts["deadline_passed"] += 1
            raise
        except OverloadError as error:
            self.counts[f"overloaded_{error.reason}"] += 1
            raise
        finally:
            self.ranking -= 1

    async def _rank(
        self,
        user: str,
        encoded: Encoded,
        later: Encoded,
        rows: torch.Tensor,
        deadline: float,
        allow_truncate: bool,
        request_time: int | None,
    ) -> RankAnswer:
        whole = encoded.then(later)
        lease, hit = None, "inline"
        if self.config.relay and self._worth(self.engine.cached_tokens(len(encoded))):
            wanted = PrefixRequest(self.engine, user, encoded)
            lease, hit = await self._ready(wanted, rows.numel(), deadline)
            if lease is None:
                seconds = math.inf if hit == "late" else self.flights.estimate(wanted)
                kept = self._fit(whole, rows.numel(), deadline, allow_truncate, seconds)
                if kept < len(whole):
                    return await self._score(
                        None,
                        whole.part(len(whole) - kept),
                        rows,
                        deadline,
                        "inline",
                        request_time,
                        True,
                    )
                lease, hit = await self._inline(wanted, deadline)
        else:
            apart = self._cheaper_apart(whole, rows.numel())
            kept = self._fit(whole, rows.numel(), deadline, allow_truncate, apart)
            if kept < len(whole):
                return await self._score(
                    None,
                    whole.part(len(whole) - kept),
                    rows,
                    deadline,
                    "inline",
                    request_time,
                    True,
                )
            if apart is not None:
                lease = await self._private(PrefixRequest(self.engine, user, whole), deadline)
        before = 0 if lease is None else lease.prefix.behaviours
        return await self._score(
            lease, whole.part(before), rows, deadline, hit, request_time, False
        )

    async def _ready(
        self, wanted: PrefixRequest, candidates: int, deadline: float
    ) -> tuple[Lease | PrivatePrefix | None, str]:
        """A prefix that is there, or that was begun before this request came; `late` where to wait
        for it would be in vain.
        """
        found = self.flights.find(wanted)
        if isinstance(found, Lease):
            return found, "device"
        flight = found
        if flight is None:
            lease = self.flights.acquire_shorter(wanted, self.config.max_tail)
            if lease is not None:
                return lease, "extended"
            flight = self.flights.find_shorter(wanted, self.config.max_tail)
        if flight is None:
            return None, "inline"
        self.counts["late"] += flight.kind == Kind.PREINFER
        queued = self.scheduler.backlog(deadline)
        tokens = self.engine.cached_tokens(len(wanted.encoded))
        needed = (
            queued + flight.job.remaining + self._rank_seconds(tokens, self.engine.hold, candidates)
        )
        if queued and time.monotonic() + needed / HOPE > deadline:
            return None, "late"
        self.scheduler.hurry(flight.job, Kind.RANK, deadline)
        await self._landing(flight, deadline)
        lease = self.cache.acquire(flight.request.key)
        return (lease, "joined") if lease is not None else (None, "inline")

    async def _inline(
        self, wanted: PrefixRequest, deadline: float
    ) -> tuple[Lease | PrivatePrefix | None, str]:
        """Nothing was begun: fill a slot now, from whatever the tiers hold; without a free slot in
        memory of its own.
        """
        flight = self.flights.start(wanted)
        if isinstance(flight, Busy):
            return await self._private(wanted, deadline), "inline"
        try:
            self._fly(flight, Kind.RANK, deadline, None)
        except OverloadError:
            self.flights.fail(flight)
            raise
        await self._landing(flight, deadline)
        source = {"host": "host", "extended": "extended"}.get(flight.source, "inline")
        return self.cache.acquire(wanted.key), source

    def _cheaper_apart(self, whole: Encoded, candidates: int) -> float | None:
        """Seconds of a prefill of its own, where that and ranking behind it are cheaper than one
        pass (see `layer_steps`).
        """
        tokens = self.engine.cached_tokens(len(whole))
        if not tokens:
            return None
        last = self.engine.tokens_per_behaviour * self.engine.hold + candidates
        prefill, in_one = (
            self.cost.prefill_seconds(tokens),
            self.cost.plain_seconds(tokens + last, 0),
        )
        in_two = prefill / self.cost.factor("prefill") + self.cost.plain_seconds(last, tokens)
        return prefill if in_two < in_one else None

    def _fit(
        self,
        whole: Encoded,
        candidates: int,
        deadline: float,
        allow_truncate: bool,
        prepare: float | None,
    ) -> int:
        """How many of the newest behaviours can be ranked in line by the deadline: all, fewer where
        allowed, or a refusal.
        """
        queued = self.scheduler.backlog(deadline)
        slack = deadline - time.monotonic() - queued
        tokens = self.engine.tokens_of(len(whole))
        final = (
            self._rank_seconds(tokens, self.engine.hold, candidates) if prepare is not None else 0.0
        )
        alone = (
            self.cost.pass_seconds(tokens + candidates, 0) if prepare is None else prepare + final
        )
        if alone <= slack:
            return len(whole)
        if not allow_truncate:
            learnt = self.cost.factor("inline" if prepare is None else "prefill")
            if not queued and alone / max(1.0, learnt) <= slack:
                return len(
                    whole
                    # nobody waits: trying costs nothing, and tells whether the machine is still so
                    # slow
                )
            raise OverloadError(
                "too_slow",
                "ranking the whole history would miss the deadline, and truncation was not allowed",
            )
        kept = keep_newest(
            len(whole),
            slack,
            lambda n: self.cost.pass_seconds(self.engine.tokens_of(n) + candidates, 0),
        )
        if not kept:
            raise OverloadError("too_slow")
        return kept

    async def _score(
        self,
        lease: Lease | PrivatePrefix | None,
        new: Encoded,
        rows: torch.Tensor,
        deadline: float,
        hit: str,
        request_time: int | None,
        truncated: bool,
    ) -> RankAnswer:
        """The last step: the suffix and the candidates behind the prefix."""
        if isinstance(lease, Lease):
            self._consumed(lease.slot.key)
        prefix = None if lease is None else lease.prefix
        try:
            question = self.engine.question(prefix, new, [], request_time).with_candidates(rows)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        seconds = self._questions_seconds([question])
        learns = "inline" if question.past is None else "rank"
        scores = await self._run(
            Kind.RANK,
            deadline,
            seconds,
            lambda: self._after_ranking(lease),
            learns,
            request=question,
        )
        self.counts[f"hit_{hit}"] += 1
        self.counts["truncated"] += truncated
        return RankAnswer(scores, hit, truncated, self.version)  # type: ignore[arg-type]

    def _after_ranking(self, lease: Lease | PrivatePrefix | None) -> None:
        """Runs once the compute thread is done with the prefix: demote it, then let go."""
        if isinstance(lease, Lease):
            self._demote(lease)
        if lease is not None:
            lease.release()

    async def retrieve(
        self, history: Behaviours, k: int, *, deadline: float, request_time: int | None = None
    ) -> list[tuple[int | str, float]]:
        """The k best items of the catalogue."""
        encoded = self._window(self.engine.encode(history))

        def steps() -> Generator[None, None, Any]:
            return self.engine.retrieve(encoded, k, request_time=request_time)
            yield  # one step, its value returned

        seconds = self.cost.prefill_seconds(self.engine.tokens_of(len(encoded)))
        items, scores = await self._run(Kind.RANK, deadline, seconds, lambda: None, steps=steps())
        return list(zip(items, scores, strict=True))

    # ---- work on the compute thread --------------------------------------------------------------

    def _fly(
        self, flight: InflightPrefix, kind: Kind, deadline: float, until: float | None
    ) -> None:
        """Submits a flight's steps; lands or crashes it on this loop when they end."""
        loop = asyncio.get_running_loop()
        landed = loop.create_future()
        tokens = self.engine.cached_tokens(len(flight.request.encoded))
        flight.done, flight.pinned_until, flight.kind = landed, until, kind

        def on_loop(error: BaseException | None) -> None:
            self.outstanding_tokens -= tokens
            if error is None:
                self.flights.finish(flight, flight.pinned_until if kind == Kind.PREINFER else None)
                self.cost.observe(
                    "prefill", flight.seconds if flight.source == "computed" else 0.0, job.spent
                )
            else:
                self.flights.fail(flight)
            if not landed.done():
                landed.set_result(error)

        job = Job(
            kind,
            deadline,
            flight.seconds,
            called_on(loop, lambda _, error: on_loop(error)),
            steps=self.flights.steps(flight),
        )
        job.expires = deadline + (self.config.ranking_budget if kind == Kind.PREINFER else 0.0)
        flight.job = job
        self.scheduler.submit(job)
        self.outstanding_tokens += tokens

    async def _landing(self, flight: InflightPrefix, deadline: float) -> None:
        """Waits for a flight, no longer than the deadline."""
        timeout = max(0.0, deadline - time.monotonic())
        done, _ = await asyncio.wait([flight.done], timeout=timeout)
        if not done:
            raise DeadlineError("the deadline passed while the history was being computed")

    async def _private(self, wanted: PrefixRequest, deadline: float) -> PrivatePrefix:
        tokens = self.engine.cached_tokens(len(wanted.encoded))

        def steps() -> Generator[int, None, Prefix]:
            buffer = PrefixBuffer(self.engine.shape, tokens + SUFFIX_ROOM)
            yield from self.engine.prefill_steps(
                wanted.encoded, buffer, None, self.cost.chunk_for(tokens)
            )
            return self.engine.prefix_of(wanted.encoded, buffer, wanted.key.digest)

        seconds = self.cost.prefill_seconds(tokens)
        return PrivatePrefix(
            await self._run(Kind.RANK, deadline, seconds, lambda: None, steps=steps())
        )

    async def _run(
        self,
        kind: Kind,
        deadline: float,
        seconds: float,
        after: Callable[[], None],
        learns: str | None = None,
        **work: Any,
    ) -> Any:
        """Submits one job and waits for its result. `after` runs on this loop when the compute
        thread has let go, in any case.
        """
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        submitted = time.monotonic()

        def on_loop(value: Any, error: BaseException | None) -> None:
            after()
            if error is None:
                self.cost.observe(learns or "rank", seconds if learns else 0.0, job.spent)
                self._waits.add(time.monotonic(), time.monotonic() - submitted - job.spent)
            if result.done():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        job = Job(kind, deadline, seconds, called_on(loop, on_loop), **work)
        try:
            self.scheduler.submit(job)
        except OverloadError:
            after()
            raise
        try:
            return await result
        except asyncio.CancelledError:
            self.scheduler.cancel(job)
            raise

    def _run_questions(self, questions: Sequence[RankQuery]) -> Sequence[Any]:
        return self.engine.answer(questions)

    def _questions_seconds(self, questions: Sequence[RankQuery]) -> float:
        """Predicted time of one pass over these requests. Several prefixes are joined by copying,
        which a batch must earn back.

        Each is copied three times: end to end with the other prefixes, once more with the new
        tokens, and into their order.
        """
        total, copied = 0.0, 0
        for q in questions:
            past = 0 if q.past is None else q.past.tokens
            new = (
                self.engine.tokens_per_behaviour * len(q.new)
                + q.candidates_C.numel()
                + (0 if past else self.engine.user_tokens)
            )
            total += self.cost.pass_seconds(new, past)
            copied += self.engine.shape.nbytes(past) if past else 0
        if len(questions) > 1:
            total -= (len(questions) - 1) * self.cost.pass_seconds(0, 0)
            total += 3 * self.cost.copy_seconds(copied)
        return total

    def _rank_seconds(self, past_tokens: int, behaviours: int, candidates: int) -> float:
        return self.cost.pass_seconds(
            self.engine.tokens_per_behaviour * behaviours + candidates, past_tokens
        )

    def _worth(self, tokens: int) -> bool:
        """Whether a prefix saves each ranking more than the extra call that computes it costs;
        short ones rank in one pass.
        """
        if not tokens or not self.config.trigger.enabled:
            return tokens > 0
        new = self.engine.tokens_per_behaviour * self.engine.hold + self.config.expected_candidates
        return self.cost.plain_seconds(tokens + new, 0) - self.cost.plain_seconds(
            new, tokens
        ) > self.cost.plain_seconds(0, 0)

    def _demote(self, lease: Lease) -> None:
        """Copies a consumed prefix to the host tier, when nothing else is to be done."""
        key = lease.slot.key
        if (
            self.expander is None
            or self._copies >= self.config.max_copies
            or self.expander.has(key)
        ):
            return
        storing = self.expander.begin(key, lease.prefix)
        if storing is None:
            return
        expander, hold = self.expander, Lease(lease.slot)
        self._copies += 1

        def on_loop(_: Any, error: BaseException | None) -> None:
            hold.release()
            self._copies -= 1
            if error is None:
                expander.finish(storing)
                self.counts["demoted"] += 1
            else:
                expander.cancel(storing)

        seconds = self.cost.copy_seconds(lease.prefix.nbytes)
        job = Job(
            Kind.COPY,
            math.inf,
            seconds,
            called_on(asyncio.get_running_loop(), on_loop),
            steps=storing.steps(),
        )
        try:
            self.scheduler.submit(job)
        except OverloadError as error:
            on_loop(None, error)

    # ---- bookkeeping -----------------------------------------------------------------------------

    def _window(self, encoded: Encoded) -> Encoded:
        return encoded.part(window_start(len(encoded), self.engine.max_len))

    def _windows(self, encoded: Encoded, later: Encoded) -> tuple[Encoded, Encoded]:
        """History and recent behaviours within the model's length, the history cut where its
        pre-inference cut it if that fits.
        """
        start = window_start(len(encoded), self.engine.max_len)
        if len(encoded) - start + len(later) > self.engine.max_len:
            start = window_start(len(encoded) + len(later), self.engine.max_len)
        return encoded.part(min(start, len(encoded))), later.part(max(0, start - len(encoded)))

    def _consumed(self, key: PrefixKey) -> None:
        admitted = self._announced.pop(key, None)
        if admitted is not None:
            self.trigger.consumed(time.monotonic() - admitted)

    def _expire(self, now: float) -> None:
        self.counts["wasted"] += self.cache.expire(now)
        horizon = now - 60.0
        for key in [key for key, at in self._announced.items() if at < horizon][:64]:
            del self._announced[key]

    def stats(self) -> dict[str, float]:
        """Counters and gauges for /metrics."""
        self._expire(time.monotonic())
        return figures(self)

    async def drain(self, timeout: float = 10.0) -> bool:
        """Takes no more pre-inference and waits until nothing is being ranked; False if the time
        ran out first.
        """
        self.draining = True
        end = time.monotonic() + timeout
        while self.ranking and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return not self.ranking

    def close(self) -> None:
        """Ends the compute thread; the host tier stays for the next process."""
        self.scheduler.close()
        if self.expander is not None:
            self.expander.close()
