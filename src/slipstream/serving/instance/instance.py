"""An instance: one engine with its compute thread, prefix tiers and trigger. No HTTP.

    instance = Instance("bundles/ml-1m", InstanceConfig(host_path="/dev/shm/slipstream-0"))
    await instance.preinfer("user 42", history, rank_in=0.1)    # returns at once, computing goes on
    deadline = time.monotonic() + 0.08
    result = await instance.rank("user 42", history, candidates, deadline=deadline)

All bookkeeping happens on the event loop that calls it; the compute thread runs steps and touches
nothing but the buffers it was given. A buffer stays held until the job that uses it has ended,
whatever became of the request. Touch this when a request takes another way through an instance.
"""

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.bundle import Bundle
from slipstream.history.user_history import History
from slipstream.serving.cache.inflight import PrefixRequest
from slipstream.serving.cache.prefix_cache import Busy, Lease
from slipstream.serving.cache.prefix_memory import PREFIX_MEMORY, PrefixMemory
from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.engine.cold_items import ColdItems
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.engine.passes import CANDIDATE_TILE
from slipstream.serving.engine.prefix import CachedTokens, PrefixKey
from slipstream.serving.engine.rank_query import NO_ROWS, RankQuery
from slipstream.serving.engine.serving_rules import ServingRules
from slipstream.serving.instance.cascade import Cascade
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.estimates import RequestEstimates
from slipstream.serving.instance.history_preparer import HistoryPreparer, PreparedRequest
from slipstream.serving.instance.instance_config import (
    Admission,
    InstanceConfig,
    RankResult,
)
from slipstream.serving.instance.job_runner import JobRunner
from slipstream.serving.instance.prefix_manager import PrefixManager, ReadyHistory
from slipstream.serving.instance.scheduler import Job, Kind, Scheduler
from slipstream.serving.instance.stats import collect_stats
from slipstream.serving.instance.trigger import ADMITTED, Prospect, Trigger
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError

ANNOUNCED_SECONDS = 60.0  # an admitted prefix not used by then is no longer waited for


class Instance:
    """One engine that computes prefixes ahead and ranks behind them, within deadlines."""

    def __init__(
        self,
        bundle: str | Path | Bundle | Engine,
        config: InstanceConfig | None = None,
        cost: CostModel | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        retrieval: "Instance | None" = None,
        memory: PrefixMemory = PREFIX_MEMORY,
        threaded: bool = True,
    ) -> None:
        """Open a bundle and start the compute thread.

        `retrieval` is another instance that retrieves for this one, and ends with it. Without
        `threaded` the caller runs the steps of `scheduler` itself, as a simulation does.
        """
        self.retrieval = retrieval
        self.config, self.clock = config or InstanceConfig(), clock
        if threaded:
            torch.set_num_threads(self.config.threads)
        precision = self.config.kv_precision
        self.engine = bundle if isinstance(bundle, Engine) else Engine(bundle, precision)
        if self.config.search != "exact" and self.engine.search is not None:
            self.engine.search.build_index(self.config.search)
        self.cost = cost or CostModel.measure(self.engine, seconds=self.config.calibrate_seconds)
        self.cost.clock = clock
        self.cost.layers = self.engine.shape.layers
        self.cost.slice_seconds = self.config.slice_seconds
        self.estimates = RequestEstimates(self.engine, self.cost, self.config)
        self.scheduler = Scheduler(
            self.engine.rank_batch,
            self.estimates.batch_seconds,
            max_jobs=self.config.max_jobs,
            max_batch=self.config.max_batch,
            clock=clock,
        )
        self.jobs = JobRunner(self.scheduler, self.cost)
        self.prefixes = PrefixManager(self.engine, self.config, self.estimates, self.jobs, memory)
        self._preparer = HistoryPreparer(self.engine, self.config, self.estimates, self.prefixes)
        self.trigger = Trigger(self.config.trigger, clock)
        self.counts: Counter[str] = self.prefixes.counts
        self._announced: dict[PrefixKey, float] = {}  # when a prefix was admitted, until it is used
        self.ranking = 0  # requests being ranked
        self.draining = False
        if threaded:
            self.scheduler.start()

    @functools.cached_property
    def cascade(self) -> Cascade:
        """The stages of a recommendation."""
        return Cascade(self, self.retrieval)

    @property
    def version(self) -> str:
        """The version of the bundle; of two, both: retrieval+ranking."""
        own = self.engine.version
        return own if self.retrieval is None else f"{self.retrieval.engine.version}+{own}"

    @property
    def max_len(self) -> int:
        """The most behaviours a request is scored on."""
        others = 0 if self.retrieval is None else self.retrieval.max_len
        return max(others, self.engine.rules.max_len)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names under which scores are returned."""
        return self.engine.tasks

    @property
    def backlog(self) -> int:
        """The behaviours whose prefixes are still to be computed."""
        others = 0 if self.retrieval is None else self.retrieval.backlog
        return others + self.prefixes.outstanding_behaviours

    @property
    def rules(self) -> ServingRules:
        """The bundle's rules of windows and repeats."""
        return self.engine.rules

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions the model reads of every behaviour."""
        return tuple(sorted({column for column, _ in self.engine.encoder.tasks.values()}))

    @property
    def timed(self) -> bool:
        """Whether a model reads times."""
        others = self.retrieval is not None and self.retrieval.timed
        return others or self.engine.encoder.timed

    @property
    def items(self) -> ItemIds:
        """The catalogue."""
        return self.engine.items

    # ---- pre-inference ---------------------------------------------------------------------------

    async def preinfer(
        self, user: str, history: History, *, rank_in: float | None = None
    ) -> Admission:
        """Announce that this user will be ranked in `rank_in` seconds.

        Decides at once; an admitted prefix is computed in the background.
        """
        now = self.clock.now()
        self._expire(now)
        rank_in = self.config.rank_in if rank_in is None else max(0.0, rank_in)
        rank_in = min(rank_in, self.config.max_pin)
        encoded = self._window(self.engine.encode(history))
        tokens = self.engine.cached_tokens(len(encoded))
        if self.draining:
            return self._refuse("draining", tokens)
        if not (self.config.relay and self.config.preinfer):
            return self._refuse("disabled", tokens)
        if not self.estimates.prefix_pays(tokens):
            return self._refuse("too_short", tokens)
        request = PrefixRequest(self.engine, user, encoded)
        until = now + rank_in + self.config.pin_grace
        pinned = self.prefixes.pin(request, until)
        if pinned is not None:
            where, key = pinned
            self._announced.setdefault(key, now)
            return Admission(True, where, key, tokens)
        reason = self.trigger.decide(self._prospect(request, tokens, rank_in, now))
        if reason != ADMITTED:
            return self._refuse(reason, tokens)
        inflight = self.prefixes.inflight.start(request)
        if isinstance(inflight, Busy):
            return self._refuse(inflight.reason, tokens)
        try:
            self.prefixes.submit(inflight, Kind.PREINFER, now + rank_in, until)
        except OverloadError as error:
            return self._refuse(error.reason, tokens)
        self._announced.pop(request.key, None)
        self._announced[request.key] = now
        self.counts["preinfer_admitted"] += 1
        return Admission(True, ADMITTED, request.key, tokens)

    def _prospect(
        self, request: PrefixRequest, tokens: int, rank_in: float, now: float
    ) -> Prospect:
        """Gather what the trigger decides by."""
        rank = self.estimates.rank_seconds(tokens, self.config.expected_candidates)
        inline = self.estimates.inline_seconds(tokens, self.config.expected_candidates)
        prefill = self.prefixes.inflight.estimate(request).seconds
        cache = self.prefixes.cache
        return Prospect(
            inline_tail=self.cost.tail_seconds(inline, "inline"),
            waiting=self.jobs.waits.tail(now),
            saved=self.estimates.saved_seconds(tokens, self.config.expected_candidates),
            prefill=prefill,
            queued=self.scheduler.backlog(now + rank_in, Kind.PREINFER),
            nbytes=self.engine.prefix_bytes(len(request.encoded)),
            pinned=cache.pinned,
            capacity=cache.budget,
            rank=self.cost.tail_seconds(rank),
            rank_in=rank_in,
            budget=self.config.ranking_budget,
        )

    def _refuse(self, reason: str, tokens: int) -> Admission:
        self.counts[f"refused_{reason}"] += 1
        return Admission(False, reason, None, tokens)

    # ---- ranking ---------------------------------------------------------------------------------

    async def rank(
        self,
        user: str,
        history: History,
        candidates: Any,
        *,
        recent: History | None = None,
        deadline: float,
        allow_truncate: bool = False,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
        rows: np.ndarray | None = None,
    ) -> RankResult:
        """Score the candidates after history and `recent`, exactly, from the best prefix there is.

        `deadline` is a moment of the instance's clock, `context` the labels of the request, `rows`
        the candidates' rows where they were looked up before.
        """
        self.check_candidates(len(candidates))
        rows_C = self.engine.items.rows(candidates) if rows is None else torch.from_numpy(rows)
        ready = await self.prepare(
            user,
            history,
            recent=recent,
            candidates=rows_C.numel(),
            deadline=deadline,
            allow_truncate=allow_truncate,
            one_pass=rows_C.numel() <= CANDIDATE_TILE or self.engine.search is not None,
        )
        return await self.score(
            ready, rows_C, deadline=deadline, request_time=request_time, context=context
        )

    def check_candidates(self, count: int) -> None:
        """Refuse more candidates than one request may have."""
        if count > self.config.max_candidates:
            raise BadRequest(
                f"{count} candidates are more than the {self.config.max_candidates} one request "
                "may have"
            )

    async def prepare(
        self,
        user: str,
        history: History,
        *,
        recent: History | None = None,
        candidates: int,
        deadline: float,
        allow_truncate: bool = False,
        one_pass: bool = False,
    ) -> ReadyHistory:
        """Find or compute the prefix behind which a request is scored, and hold it.

        What is returned goes to `score` or `search`, once, or to `release`. With `one_pass` it goes
        to `score`, which may compute the prefix itself.
        """
        now = self.clock.now()
        if now >= deadline:
            self.counts["deadline_passed"] += 1
            raise DeadlineError("the deadline had passed when the request arrived")
        older, newer = self._windows(self.engine.encode(history), self.engine.encode(recent))
        self._expire(now)
        with self.underway():
            return await self._preparer.prepare(
                PreparedRequest(user, older, newer, candidates, deadline, allow_truncate, one_pass)
            )

    def release(self, ready: ReadyHistory, error: BaseException | None = None) -> None:
        """Let go of a prepared history that is not scored after all."""
        if ready.held is not None:
            ready.held.release()
        if ready.fills is not None:
            self.prefixes.end_fill(ready.fills, error or OverloadError("cancelled"))

    async def score(
        self,
        ready: ReadyHistory,
        rows_C: torch.Tensor,
        *,
        deadline: float,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
        cold: ColdItems | None = None,
    ) -> RankResult:
        """Score rows of the catalogue, and of `cold` items, after a prepared history."""
        query = self.query(ready, request_time, context, rows_C)
        if cold is not None:
            query = replace(query, cold=cold)
        seconds = self.estimates.score_seconds(query)
        work: dict[str, Any] = {
            "request": query,
            "learn": "inline" if query.past is None else "rank",
        }
        if cold is not None or (rows_C.numel() > CANDIDATE_TILE and self.engine.search is None):
            work = {"steps": self.engine.rank_steps(query), "bulk": True}

        def started(job: Job) -> None:
            if ready.fills is not None:
                ready.fills.job = job

        def release(error: BaseException | None) -> None:
            self.prefixes.release(ready.held)
            if ready.fills is not None:
                self.prefixes.end_fill(ready.fills, error)

        with self.underway():
            scores = await self.jobs.run(
                deadline, seconds, started=started, release=release, **work
            )
        self.count_hit(ready)
        kept = isinstance(ready.held, Lease) or ready.fills is not None
        return RankResult(scores, ready.hit, ready.truncated, self.version, kept)

    def query(
        self,
        ready: ReadyHistory,
        request_time: int | None,
        context: Mapping[str, str | None] | None,
        rows_C: torch.Tensor = NO_ROWS,
    ) -> RankQuery:
        """Return the query of a prepared history and of the rows of its candidates."""
        if isinstance(ready.held, Lease) and ready.held.slot.pinned_until is None:
            self._consume(ready.held.slot.key)
        prefix = None if ready.held is None else ready.held.prefix
        try:
            query = self.engine.query_of_rows(prefix, ready.new, rows_C, request_time, context)
        except BaseException as error:
            self.release(ready, error)
            raise
        if ready.fills is None:
            return query
        buffer = ready.fills.slot.buffer
        return replace(query, kept=CachedTokens(buffer, buffer.capacity))

    @contextlib.contextmanager
    def underway(self) -> Iterator[None]:
        """Count a request that is being ranked, and why it was given up."""
        self.ranking += 1
        try:
            yield
        except DeadlineError:
            self.counts["deadline_passed"] += 1
            raise
        except OverloadError as error:
            self.counts[f"overloaded_{error.reason}"] += 1
            raise
        finally:
            self.ranking -= 1

    def count_hit(self, ready: ReadyHistory) -> None:
        """Count where the prefix of an answered request was found."""
        self.counts[f"hit_{ready.hit}"] += 1
        self.counts["truncated"] += ready.truncated

    # ---- bookkeeping -----------------------------------------------------------------------------

    def _window(self, encoded: EncodedHistory) -> EncodedHistory:
        """Return the part of a history that the model sees."""
        return encoded.part(self.rules.window_start(len(encoded)))

    def _windows(
        self, older: EncodedHistory, newer: EncodedHistory
    ) -> tuple[EncodedHistory, EncodedHistory]:
        """Return history and recent behaviours within the model's length.

        The history is cut where its pre-inference cut it, if the recent behaviours still fit.
        """
        start = self.rules.window_start(len(older))
        if len(older) - start + len(newer) > self.rules.max_len:
            start = self.rules.window_start(len(older) + len(newer))
        return older.part(min(start, len(older))), newer.part(max(0, start - len(older)))

    def _consume(self, key: PrefixKey) -> None:
        """Note that an announced prefix is used, and how long after its admission."""
        admitted = self._announced.pop(key, None)
        if admitted is not None:
            self.trigger.consumed(self.clock.now() - admitted)

    def _expire(self, now: float) -> None:
        """End pins whose request never came, and forget old announcements, a few at a time."""
        self.counts["wasted"] += self.prefixes.cache.expire()
        horizon = now - ANNOUNCED_SECONDS
        announced = self._announced  # in the order of their times
        old = itertools.takewhile(lambda key: announced[key] < horizon, announced)
        for key in list(itertools.islice(old, 64)):
            del announced[key]

    # ---- life ------------------------------------------------------------------------------------

    async def forget(self, user: str, deadline: float) -> None:
        """Delete a user's prefixes from every tier, as soon as nothing uses them any more."""
        if self.retrieval is not None:
            await self.retrieval.forget(user, deadline)
        self._preparer.returning.forget(user)
        while not self.prefixes.forget(user):
            if self.clock.now() >= deadline:
                raise DeadlineError("the deadline passed while the user's prefixes were in use")
            await asyncio.sleep(0.005)

    def is_alive(self) -> bool:
        """Return whether the compute thread moves."""
        return self.scheduler.is_alive()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges for /metrics."""
        self._expire(self.clock.now())
        found = collect_stats(self)
        if self.retrieval is not None:
            others = {f"retrieval_{name}": n for name, n in self.retrieval.stats().items()}
            found |= others | {"items_not_ranked": float(self.cascade.unranked_items)}
        return found

    async def drain(self, timeout: float = 10.0) -> bool:
        """Refuse pre-inference and wait until nothing is being ranked; False: the time ran out."""
        self.draining = True
        end = self.clock.now() + timeout
        others = True
        if self.retrieval is not None:
            others = await self.retrieval.drain(timeout)
        while self.ranking and self.clock.now() < end:
            await asyncio.sleep(0.005)
        return others and not self.ranking

    async def keep_prefixes(self, seconds: float) -> None:
        """Copy prefixes to the host tier for the next process, within so many seconds."""
        for each in (self, self.retrieval):
            if each is not None:
                await each.prefixes.copies.finish(seconds)

    def close(self) -> None:
        """End the compute thread; the host tier stays for the next process."""
        if self.retrieval is not None:
            self.retrieval.close()
        self.scheduler.close()
        self.prefixes.close()

    def discard(self) -> None:
        """Close, and delete the host tier: another version has taken over."""
        if self.retrieval is not None:
            self.retrieval.discard()
        self.close()
        if self.config.host_path is not None:
            Path(self.config.host_path).unlink(missing_ok=True)
