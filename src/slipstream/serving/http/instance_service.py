"""What an instance answers, without HTTP: histories, tickets, the cascade, drain and reload.

A history is cut by the bundle's window rule (`history.window`), a stored one from numbers that
count from the first behaviour ever: what a request is scored on depends on the store alone, never
on the ticket. Touch this when an endpoint does something else.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.history.history_store import KEEP, HistoryStore
from slipstream.history.user_history import History
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.http.request_history import (
    append_recent,
    check_times,
    drop_unknown,
    read_history,
    refuse_long,
    select_actions,
)
from slipstream.serving.id_arrays import id_array
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.router.ticket import TicketSigner

if TYPE_CHECKING:  # a stand-in can be served without torch
    from slipstream.serving.instance.instance import Instance

# Opens what is to be served now, given the present instance (None at start); may return that one.
OpenInstance = Callable[["Instance | None"], "Instance"]
HistoryRequest = m.PreinferRequest | m.RankRequest | m.RecommendRequest


class InstanceService:
    """The endpoints of one instance."""

    def __init__(
        self,
        name: str,
        open_instance: OpenInstance,
        store: HistoryStore,
        tickets: TicketSigner,
        drain_seconds: float = 10.0,
    ) -> None:
        self.name, self.store, self._tickets = name, store, tickets
        self._open, self._drain_seconds = open_instance, drain_seconds
        self.instance = open_instance(None)
        self.draining = False
        self._reloading = asyncio.Lock()
        self._uses: dict[Instance, int] = {}  # requests that use each open instance
        self._closing: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of every endpoint by its name."""
        return {
            "preinfer": self.preinfer,
            "rank": self.rank,
            "recommend": self.recommend,
            "events": self.events,
            "user": self.user,
            "delete": self.delete,
            "status": self.status,
            "healthz": self.healthz,
            "readyz": self.readyz,
            "drain": self.drain,
            "reload": self.reload,
        }

    # ---- work ------------------------------------------------------------------------------------

    async def preinfer(
        self, request: m.PreinferRequest, context: RequestContext
    ) -> m.PreinferAnswer:
        """Announce a ranking; answer with a ticket whether or not it is admitted."""
        async with self._use() as instance:
            history, _ = await self._history(instance, request)
            rank_in = None if request.rank_in_ms is None else request.rank_in_ms / 1000
            admission = await instance.preinfer(
                request.user, drop_unknown(instance, history), rank_in=rank_in
            )
            ticket = self._tickets.issue(
                request.user, self.name, instance.version, history.first, history.total
            )
            return m.PreinferAnswer(
                ticket,
                admission.admitted,
                admission.reason,
                self.name,
                instance.version,
                len(history),
            )

    async def rank(self, request: m.RankRequest, context: RequestContext) -> m.RankAnswer:
        """Score candidates, behind the prefix that the ticket names where there is one."""
        ticket = None
        if request.ticket is not None:
            ticket = self._tickets.read(request.ticket, request.user)
        async with self._use() as instance:
            extra = len(request.recent.items) if request.recent is not None else 0
            history, _ = await self._history(instance, request, extra)
            split = history.total
            if ticket is not None and history.first < ticket.end < history.total:
                split = ticket.end
            older, recent = history.part(history.first, split), history.part(split, history.total)
            if request.recent is not None:
                sent = read_history(request.recent, request.features, instance.timed)
                recent = append_recent(recent, sent)
            behaviours = len(older) + len(recent)
            older, recent = drop_unknown(instance, older), drop_unknown(instance, recent)
            items, unknown = _split_known(instance, request.candidates)
            answer = m.RankAnswer(
                {task: [] for task in instance.tasks},
                instance.version,
                self.name,
                "none",
                truncated=False,
                behaviours=behaviours,
                items=items,
                unknown=unknown,
                skipped=behaviours - len(older) - len(recent),
            )
            answer.titles, answer.shown = _about(instance, request, items)
            if items:
                result = await instance.rank(
                    request.user,
                    older,
                    items,
                    recent=recent if len(recent) else None,
                    deadline=context.deadline,
                    allow_truncate=request.allow_truncate,
                    request_time=request.request_time,
                )
                answer.scores = {task: scores.tolist() for task, scores in result.scores.items()}
                answer.hit, answer.truncated = result.hit, result.truncated
            return answer

    async def recommend(
        self, request: m.RecommendRequest, context: RequestContext
    ) -> m.RecommendAnswer:
        """Retrieve, filter and rank; the prefix is computed while retrieval runs."""
        async with self._use() as instance:
            task = _task(instance, request)
            _about(instance, request, [])  # refuses names that are no item feature
            keep_seen = request.keep_seen
            drop_seen = instance.rules.exclude_seen if keep_seen is None else not keep_seen
            window, seen = await self._history(instance, request, whole=drop_seen)
            history = drop_unknown(instance, window)
            await instance.preinfer(request.user, history, rank_in=None)
            excluded = id_array(request.exclude)
            if drop_seen:
                excluded = np.concatenate([excluded, seen])
            items, unknown = await self._candidates(
                instance, history, request, excluded, context.deadline
            )
            answer = m.RecommendAnswer(
                [],
                {task: [] for task in instance.tasks},
                instance.version,
                self.name,
                "none",
                truncated=False,
                behaviours=len(window),
                unknown=unknown,
                skipped=len(window) - len(history),
            )
            if items:
                result = await instance.rank(
                    request.user,
                    history,
                    items,
                    recent=None,
                    deadline=context.deadline,
                    allow_truncate=request.allow_truncate,
                    request_time=request.request_time,
                )
                scores = {task: values.tolist() for task, values in result.scores.items()}
                by = scores[task]
                best = sorted(range(len(items)), key=lambda place: -by[place])[: request.count]
                answer.items = [items[place] for place in best]
                answer.scores = {
                    task: [values[place] for place in best] for task, values in scores.items()
                }
                answer.hit, answer.truncated = result.hit, result.truncated
            answer.titles, answer.shown = _about(instance, request, answer.items)
            return answer

    async def _candidates(
        self,
        instance: "Instance",
        history: History,
        request: m.RecommendRequest,
        excluded: np.ndarray,
        deadline: float,
    ) -> tuple[list[m.Identity], list[m.Identity]]:
        """Return the items to rank, sent or retrieved ones without the excluded, and unknown."""
        if request.candidates is not None:
            rows = instance.items.find(request.candidates)
            dropped = np.isin(rows, instance.items.find(excluded))
            kept = instance.items.originals(rows[(rows >= 0) & ~dropped])
            return kept, _places(request.candidates, rows < 0)
        found = await instance.retrieve(
            history,
            request.retrieve,
            deadline=deadline,
            request_time=request.request_time,
            exclude_seen=False,  # what was seen is among the excluded, where the rule says so
            exclude=excluded,
        )
        return [item for item, _ in found], []

    async def events(self, request: m.EventsRequest, context: RequestContext) -> m.EventsAnswer:
        """Append behaviours to the store."""
        now = int(time.time())
        times = request.timestamps if request.timestamps is not None else [now] * len(request.items)
        sent = read_history(m.HistoryMessage(request.items, times, request.actions))
        check_times(times, now)
        history = replace(sent, items=self.instance.items.canonical(sent.items))
        total = await self.store.append(request.user, history, request.after)
        return m.EventsAnswer(total)

    async def user(self, _message: None, context: RequestContext) -> m.UserAnswer:
        """Show what is stored of a user."""
        user, limit = context.path["user"], context.query.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or int(limit) > 1000:
            raise BadRequest("limit is a whole number from 0 to 1000")
        known = len(user) <= m.MAX_ID_CHARACTERS
        stored = await self.store.read(user, int(limit)) if known else None
        if stored is None:
            raise HttpProblem(
                404, "unknown_user", "nothing is stored of this user; send behaviours to /v1/events"
            )
        actions = {name: values.tolist() for name, values in stored.actions.items()}
        recent = m.HistoryMessage(stored.items.tolist(), stored.timestamps.tolist(), actions)
        return m.UserAnswer(user, stored.total, recent)

    async def delete(self, _message: None, context: RequestContext) -> m.DeleteAnswer:
        """Delete what is stored of a user, then the prefixes computed from it."""
        user = context.path["user"]
        if len(user) > m.MAX_ID_CHARACTERS:
            raise BadRequest(f"a user's id has at most {m.MAX_ID_CHARACTERS} characters")
        deleted = await self.store.delete(user)
        async with self._use() as instance:
            await instance.forget(user, context.deadline)
        return m.DeleteAnswer(user, deleted)

    # ---- life ------------------------------------------------------------------------------------

    async def status(self, _message: None, context: RequestContext) -> m.StatusAnswer:
        """Show the instance's state, for routers."""
        return m.StatusAnswer(
            self.name,
            self.instance.version,
            not self.draining,
            self.draining,
            self.instance.backlog,
            self.instance.stats(),
        )

    async def healthz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Say that the process is alive."""
        return m.HealthAnswer("ok")

    async def readyz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Say whether requests may be sent."""
        if self.draining:
            raise HttpProblem(503, "draining", "draining")
        return m.HealthAnswer("ok")

    async def drain(self, request: m.DrainRequest, context: RequestContext) -> m.DrainAnswer:
        """Report to be not ready from now on, so that routers send nothing more."""
        if request.instance not in (None, self.name):
            raise HttpProblem(404, "not_found", f"this is instance '{self.name}'")
        self.draining = True
        return m.DrainAnswer(self.name)

    async def reload(self, request: m.ReloadRequest, context: RequestContext) -> m.ReloadAnswer:
        """Open the bundle again and serve it; requests in flight end on the instance they have."""
        async with self._reloading:
            old = self.instance
            new = await asyncio.to_thread(self._open, old)
            if request.version not in (None, new.version):
                if new is not old:
                    new.discard()
                raise HttpProblem(
                    409,
                    "conflict",
                    f"the bundle holds version {new.version}, not {request.version}",
                )
            self.instance = new
        if new is not old:
            task = asyncio.create_task(self._close_when_unused(old, old.discard))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return m.ReloadAnswer({self.name: old.version}, {self.name: new.version})

    async def close(self) -> None:
        """Finish running requests, then close the instance and the store."""
        self.draining = True
        await self._close_when_unused(self.instance, self.instance.close)
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._drain_seconds)
        await self.store.close()

    async def _close_when_unused(self, instance: "Instance", close: Callable[[], None]) -> None:
        end = time.monotonic() + self._drain_seconds
        while self._uses.get(instance) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await instance.drain(max(0.0, end - time.monotonic()))
        close()

    @contextlib.asynccontextmanager
    async def _use(self) -> AsyncIterator["Instance"]:
        """Keep the present instance open while a request uses it."""
        instance = self.instance
        self._uses[instance] = self._uses.get(instance, 0) + 1
        try:
            yield instance
        finally:
            self._uses[instance] -= 1
            if not self._uses[instance]:
                del self._uses[instance]

    # ---- histories -------------------------------------------------------------------------------

    async def _history(
        self, instance: "Instance", request: HistoryRequest, extra: int = 0, whole: bool = False
    ) -> tuple[History, np.ndarray]:
        """Return the window to score on, of the history sent or stored, and all items of it.

        The window leaves room for `extra` behaviours that the request brings. Of a stored history
        only the window is read, unless `whole`.
        """
        rules = instance.rules
        if request.history is not None:
            history = read_history(request.history, request.features, instance.timed)
            if not isinstance(request, m.PreinferRequest):
                refuse_long(history, rules.max_len, request.allow_truncate)
        else:
            since = 0 if whole else None
            limit = KEEP if whole else rules.max_len
            stored = await self.store.read(request.user, limit, since)
            if stored is None:
                raise HttpProblem(
                    404,
                    "unknown_user",
                    "nothing is stored of this user; send a history, or behaviours to /v1/events",
                )
            history = select_actions(stored, instance.actions)
            history = replace(history, user_features=request.features)
        first = rules.window_start(history.total + extra, history.first)
        return history.part(min(first, history.total), history.total), history.items


def _task(instance: "Instance", request: m.RecommendRequest) -> str:
    """Return the task to order by."""
    if request.by is not None and request.by not in instance.tasks:
        raise BadRequest(
            f"'{request.by}' is no task of this model; order by one of {', '.join(instance.tasks)}"
        )
    return request.by if request.by is not None else instance.tasks[0]


def _split_known(
    instance: "Instance", items: list[m.Identity]
) -> tuple[list[m.Identity], list[m.Identity]]:
    """Return the items the catalogue holds, as it writes them, and those it lacks, as sent."""
    rows = instance.items.find(items)
    return instance.items.originals(rows[rows >= 0]), _places(items, rows < 0)


def _places(items: list[m.Identity], chosen: np.ndarray) -> list[m.Identity]:
    """Return the items whose place in `chosen` is true."""
    return [items[place] for place in np.flatnonzero(chosen).tolist()]


def _about(
    instance: "Instance", request: m.RankRequest | m.RecommendRequest, items: list[m.Identity]
) -> tuple[list[str | None] | None, dict[str, list[Any]] | None]:
    """Return titles and features of items, as far as the request asks for them."""
    return (
        instance.items.titles(items) if request.titles else None,
        instance.items.shown(request.show, items) if request.show else None,
    )
