"""What an instance answers, without HTTP: histories, tickets, the cascade, drain and reload.

Here a message becomes a `History`, and only here. A stored history is cut by the window rule
(`history.window`) from numbers that count from the first behaviour ever: what a request is scored
on depends on the store alone, never on the ticket. Touch this when an endpoint does something else.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.history.history_store import HistoryStore
from slipstream.history.user_history import History
from slipstream.history.window import PARTS, window_start
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
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
        actions: tuple[str, ...] = (),
    ) -> None:
        self.name, self.store, self._tickets = name, store, tickets
        self._open, self._drain_seconds = open_instance, drain_seconds
        self._actions = actions  # those the model reads; an absent one counts as 0
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
            history = await self._history(instance, request)
            rank_in = None if request.rank_in_ms is None else request.rank_in_ms / 1000
            admission = await instance.preinfer(
                request.user, _without_unknown(instance, history, request), rank_in=rank_in
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
            history = await self._history(instance, request, extra)
            split = history.total
            if ticket is not None and history.first < ticket.end < history.total:
                split = ticket.end
            older, recent = history.part(history.first, split), history.part(split, history.total)
            if request.recent is not None:
                recent = _append_recent(recent, read_history(request.recent, request.features))
            result = await instance.rank(
                request.user,
                _without_unknown(instance, older, request),
                request.candidates,
                recent=_without_unknown(instance, recent, request) if len(recent) else None,
                deadline=context.deadline,
                allow_truncate=request.allow_truncate,
            )
            return m.RankAnswer(
                {task: scores.tolist() for task, scores in result.scores.items()},
                result.version,
                self.name,
                result.hit,
                result.truncated,
                len(older) + len(recent),
            )

    async def recommend(
        self, request: m.RecommendRequest, context: RequestContext
    ) -> m.RecommendAnswer:
        """Retrieve, filter and rank; the prefix is computed while retrieval runs."""
        async with self._use() as instance:
            if request.by is not None and request.by not in instance.tasks:
                raise BadRequest(
                    f"'{request.by}' is no task of this model; order by one of "
                    f"{', '.join(instance.tasks)}"
                )
            whole = await self._history(instance, request)
            history = _without_unknown(instance, whole, request)
            await instance.preinfer(request.user, history, rank_in=None)
            items = await self._candidates(instance, whole, history, request, context.deadline)
            if not items:
                none: dict[str, list[float]] = {task: [] for task in instance.tasks}
                return m.RecommendAnswer(
                    [], none, instance.version, self.name, "none", False, len(whole)
                )
            result = await instance.rank(
                request.user,
                history,
                items,
                recent=None,
                deadline=context.deadline,
                allow_truncate=request.allow_truncate,
            )
            scores = {task: values.tolist() for task, values in result.scores.items()}
            by = scores[request.by if request.by is not None else next(iter(scores))]
            best = sorted(range(len(items)), key=lambda place: -by[place])[: request.count]
            return m.RecommendAnswer(
                [items[place] for place in best],
                {task: [values[place] for place in best] for task, values in scores.items()},
                result.version,
                self.name,
                result.hit,
                result.truncated,
                len(whole),
            )

    async def _candidates(
        self,
        instance: "Instance",
        whole: History,
        history: History,
        request: m.RecommendRequest,
        deadline: float,
    ) -> list[int]:
        """Return the items to rank: sent or retrieved ones, without seen and excluded ones."""
        dropped = set(request.exclude)
        if not request.keep_seen:
            dropped |= set(whole.items.tolist())
        items = request.candidates
        if items is None:
            count = min(request.retrieve + len(dropped), m.MAX_CANDIDATES)
            found = await instance.retrieve(history, count, deadline=deadline)
            items = [int(item) for item, _ in found]
        kept = [item for item in items if item not in dropped]
        return kept[: max(request.retrieve, len(request.candidates or ()))]

    async def events(self, request: m.EventsRequest, context: RequestContext) -> m.EventsAnswer:
        """Append behaviours to the store."""
        sent = m.HistoryMessage(request.items, request.timestamps, request.actions)
        total = await self.store.append(request.user, read_history(sent), request.after)
        return m.EventsAnswer(total)

    async def user(self, _message: None, context: RequestContext) -> m.UserAnswer:
        """Show what is stored of a user."""
        user, limit = context.path["user"], context.query.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or int(limit) > 1000:
            raise BadRequest("limit is a whole number from 0 to 1000")
        stored = await self.store.read(user, int(limit)) if len(user) <= 256 else None
        if stored is None:
            raise HttpProblem(
                404, "unknown_user", "nothing is stored of this user; send behaviours to /v1/events"
            )
        actions = {name: values.tolist() for name, values in stored.actions.items()}
        recent = m.HistoryMessage(stored.items.tolist(), stored.timestamps.tolist(), actions)
        return m.UserAnswer(user, stored.total, recent)

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
        self, instance: "Instance", request: HistoryRequest, extra: int = 0
    ) -> History:
        """Return the history to score on: the one sent, or the window of the stored one.

        The window leaves room for `extra` behaviours that the request brings.
        """
        if request.history is not None:
            return read_history(request.history, request.features)
        max_len = instance.max_len
        stored = await self.store.read(request.user, max_len + max(1, max_len // PARTS))
        if stored is None:
            raise HttpProblem(
                404,
                "unknown_user",
                "nothing is stored of this user; send a history, or behaviours to /v1/events",
            )
        first = window_start(stored.total + extra, max_len, stored.first)
        window = stored.part(min(first, stored.total), stored.total)
        absent = np.zeros(len(window), dtype=np.float32)
        actions = {name: window.actions.get(name, absent) for name in self._actions}
        return replace(window, actions=actions, user_features=request.features)


def read_history(message: m.HistoryMessage, features: m.Features | None = None) -> History:
    """Return a message's history; `BadRequest` where lengths differ or time goes back."""
    items = np.array(message.items, dtype=np.int64)
    timestamps = np.array(message.timestamps, dtype=np.int64)
    if len(timestamps) != len(items):
        raise BadRequest(
            f"a history has {len(items)} items but {len(timestamps)} timestamps; send one for each"
        )
    if (timestamps[1:] < timestamps[:-1]).any():
        raise BadRequest("the timestamps of a history go back; send behaviours oldest first")
    actions = {name: np.array(values, dtype=np.float32) for name, values in message.actions.items()}
    for name, values in actions.items():
        if len(values) != len(items):
            raise BadRequest(
                f"action '{name}' has {len(values)} values for {len(items)} behaviours; send one "
                "for each"
            )
    return History(items, timestamps, actions, features or {})


def _append_recent(stored: History, recent: History) -> History:
    """Return the behaviours after the prefix: newly stored ones, then those of the request."""
    if len(stored) and len(recent) and recent.timestamps[0] < stored.timestamps[-1]:
        raise BadRequest(
            "the recent behaviours are older than stored ones; send only what is not stored yet"
        )
    return stored.then(recent)


def _without_unknown(instance: "Instance", history: History, request: HistoryRequest) -> History:
    """Drop stored items that the catalogue lacks; the engine refuses those in a sent history."""
    return (
        history
        if request.history is not None
        else history.where(instance.known_items(history.items))
    )
