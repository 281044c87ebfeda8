"""What an instance answers, without HTTP: histories from the message or the store, tickets, the
cascade, drain and reload.

The window of a stored history starts at a multiple of `max_len / 8`, so that it stays put while the
history grows: yesterday's prefix is then a prefix of today's history, and what a request is scored
on depends on the store alone, never on the ticket.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import numpy as np

from slipstream.history.history_store import HistoryStore, StoredHistory
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.router.ticket import TicketSigner


class ServedModel(Protocol):
    """One opened bundle, ready to answer (`serving.instance.Instance`, or what stands in for it)."""

    @property
    def version(self) -> str: ...

    @property
    def max_len(self) -> int: ...

    @property
    def tasks(self) -> tuple[str, ...]: ...

    @property
    def backlog(self) -> int:
        """Tokens still to be computed."""

    async def preinfer(self, user: str, history: Any, *, rank_in: float | None) -> Any: ...

    async def rank(
        self,
        user: str,
        history: Any,
        candidates: list[int],
        *,
        recent: Any,
        deadline: float,
        allow_truncate: bool,
    ) -> Any: ...

    async def retrieve(
        self, history: Any, k: int, *, deadline: float
    ) -> list[tuple[Any, float]]: ...

    def stats(self) -> dict[str, float]: ...

    async def drain(self, timeout: float) -> Any: ...

    def close(self) -> None: ...

    def discard(self) -> None:
        """Close for good: another version has taken over."""


OpenModel = Callable[
    [Any], ServedModel
]  # given the present model (or None); may return it when nothing has changed
MakeBehaviours = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray], Mapping[str, int]], Any]
Known = Callable[[ServedModel, np.ndarray], np.ndarray]


def window_start(total: int, oldest: int, max_len: int) -> int:
    """The number of the first behaviour to score on: a multiple of max_len / 8, the smallest that
    leaves at most `max_len`.
    """
    if total - oldest <= max_len and oldest == 0:
        return 0
    step = max(1, max_len // 8)
    return -(-max(total - max_len, oldest) // step) * step


class InstanceService:
    """The endpoints of one instance."""

    def __init__(
        self,
        name: str,
        open_model: OpenModel,
        store: HistoryStore,
        office: TicketSigner,
        behaviours: MakeBehaviours,
        known: Known,
        drain_seconds: float = 10.0,
    ) -> None:
        self.name, self.store, self._office = name, store, office
        self._open, self._behaviours, self._known, self._drain_seconds = (
            open_model,
            behaviours,
            known,
            drain_seconds,
        )
        self.model = open_model(None)
        self.draining = False
        self._reloading = asyncio.Lock()
        self._in_use: dict[ServedModel, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Handler]:
        names = (
            "preinfer",
            "rank",
            "recommend",
            "events",
            "user",
            "status",
            "healthz",
            "readyz",
            "drain",
            "reload",
        )
        return {name: getattr(self, name) for name in names}

    # Work

    async def preinfer(self, request: m.PreinferRequest, asked: RequestContext) -> m.PreinferAnswer:
        async with self._using() as model:
            history = await self._history(model, request.user, request.history)
            rank_in = None if request.rank_in_ms is None else request.rank_in_ms / 1000
            admission = await model.preinfer(
                request.user, self._seen(model, history, request), rank_in=rank_in
            )
            ticket = self._office.issue(
                request.user, self.name, model.version, history.first, history.total
            )
            return m.PreinferAnswer(
                ticket,
                admission.admitted,
                admission.reason,
                self.name,
                model.version,
                len(history.items),
            )

    async def rank(self, request: m.RankRequest, asked: RequestContext) -> m.RankAnswer:
        ticket = (
            self._office.read(request.ticket, request.user) if request.ticket is not None else None
        )
        async with self._using() as model:
            extra = len(request.recent.items) if request.recent is not None else 0
            history = await self._history(model, request.user, request.history, extra)
            split = history.total
            if ticket is not None and history.first < ticket.end < history.total:
                split = ticket.end
            old, new = history.part(history.first, split), history.part(split, history.total)
            recent = _joined(new, request.recent)
            answer = await model.rank(
                request.user,
                self._seen(model, old, request),
                request.candidates,
                recent=self._seen(model, recent, request) if len(recent.items) else None,
                deadline=asked.deadline,
                allow_truncate=request.allow_truncate,
            )
            scores = {task: _numbers(values) for task, values in answer.scores.items()}
            count = len(old.items) + len(recent.items)
            return m.RankAnswer(
                scores, answer.version, self.name, str(answer.hit), answer.truncated, count
            )

    async def recommend(
        self, request: m.RecommendRequest, asked: RequestContext
    ) -> m.RecommendAnswer:
        async with self._using() as model:
            if request.by is not None and request.by not in model.tasks:
                raise BadRequest(
                    f"'{request.by}' is no task of this model; order by one of "
                    f"{', '.join(model.tasks)}"
                )
            history = await self._history(model, request.user, request.history)
            behaviours = self._seen(model, history, request)
            await model.preinfer(
                request.user, behaviours, rank_in=None
            )  # goes on while retrieval and filtering run
            unwanted = set(request.exclude) | (
                set() if request.keep_seen else set(history.items.tolist())
            )
            found = request.candidates
            if found is None:
                wanted = min(request.retrieve + len(unwanted), m.MAX_CANDIDATES)
                found = [
                    item
                    for item, _ in await model.retrieve(behaviours, wanted, deadline=asked.deadline)
                ]
            kept = [item for item in found if item not in unwanted][
                : max(request.retrieve, len(request.candidates or ()))
            ]
            if not kept:
                none: dict[str, list[float]] = {task: [] for task in model.tasks}
                return m.RecommendAnswer(
                    [], none, model.version, self.name, "none", False, len(history.items)
                )
            answer = await model.rank(
                request.user,
                behaviours,
                kept,
                recent=None,
                deadline=asked.deadline,
                allow_truncate=request.allow_truncate,
            )
            scores = {task: _numbers(values) for task, values in answer.scores.items()}
            by = scores[request.by if request.by is not None else next(iter(scores))]
            best = sorted(range(len(kept)), key=lambda place: -by[place])[: request.count]
            return m.RecommendAnswer(
                [kept[place] for place in best],
                {task: [values[place] for place in best] for task, values in scores.items()},
                answer.version,
                self.name,
                str(answer.hit),
                answer.truncated,
                len(history.items),
            )

    async def events(self, request: m.EventsRequest, asked: RequestContext) -> m.EventsAnswer:
        sent = sent_history(m.History(request.items, request.timestamps, request.actions))
        total = await self.store.append(request.user, sent, request.after)
        return m.EventsAnswer(total)

    async def user(self, _message: None, asked: RequestContext) -> m.UserAnswer:
        user, limit = asked.path["user"], asked.query.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or int(limit) > 1000:
            raise BadRequest("limit is a whole number from 0 to 1000")
        stored = await self.store.read(user, int(limit)) if len(user) <= 256 else None
        if stored is None:
            raise HttpProblem(
                404, "unknown_user", "nothing is stored of this user; send behaviours to /v1/events"
            )
        actions = {name: values.tolist() for name, values in stored.actions.items()}
        return m.UserAnswer(
            user,
            stored.total,
            m.History(stored.items.tolist(), stored.timestamps.tolist(), actions),
        )

    # Life

    async def status(self, _message: None, asked: RequestContext) -> m.StatusAnswer:
        return m.StatusAnswer(
            self.name,
            self.model.version,
            not self.draining,
            self.draining,
            self.backlog(),
            self.model.stats(),
        )

    async def healthz(self, _message: None, asked: RequestContext) -> m.HealthAnswer:
        return m.HealthAnswer("ok")

    async def readyz(self, _message: None, asked: RequestContext) -> m.HealthAnswer:
        if self.draining:
            raise HttpProblem(503, "draining", "draining")
        return m.HealthAnswer("ok")

    async def drain(self, request: m.DrainRequest, asked: RequestContext) -> m.DrainAnswer:
        if request.instance not in (None, self.name):
            raise HttpProblem(404, "not_found", f"this is instance '{self.name}'")
        self.draining = True
        return m.DrainAnswer(self.name)

    async def reload(self, request: m.ReloadRequest, asked: RequestContext) -> m.ReloadAnswer:
        """Opens the bundle beside the present one, then changes over; requests in flight finish on
        the model they began with.
        """
        async with self._reloading:
            old = self.model
            fresh = await asyncio.to_thread(self._open, old)
            if request.version not in (None, fresh.version):
                if fresh is not old:
                    fresh.discard()
                raise HttpProblem(
                    409,
                    "conflict",
                    f"the bundle holds version {fresh.version}, not {request.version}",
                )
            self.model = fresh
        if fresh is not old:
            task = asyncio.create_task(self._retire(old, old.discard))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return m.ReloadAnswer({self.name: old.version}, {self.name: fresh.version})

    def backlog(self) -> int:
        """Tokens still to be computed, for routers to balance by."""
        return self.model.backlog

    async def close(self) -> None:
        """Finish what is running, then let go of everything."""
        self.draining = True
        await self._retire(self.model, self.model.close)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._drain_seconds)
        await self.store.close()

    async def _retire(self, model: ServedModel, close: Callable[[], None]) -> None:
        end = time.monotonic() + self._drain_seconds
        while self._in_use.get(model) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await model.drain(max(0.0, end - time.monotonic()))
        close()

    @contextlib.asynccontextmanager
    async def _using(self) -> AsyncIterator[ServedModel]:
        """The present model, kept open until this request is done with it."""
        model = self.model
        self._in_use[model] = self._in_use.get(model, 0) + 1
        try:
            yield model
        finally:
            self._in_use[model] -= 1
            if not self._in_use[model]:
                del self._in_use[model]

    # Histories

    async def _history(
        self, model: ServedModel, user: str, given: m.History | None, extra: int = 0
    ) -> StoredHistory:
        """The history to score on: as sent, or the stored window that leaves room for `extra`
        behaviours the request brings.
        """
        if given is not None:
            return sent_history(given)
        stored = await self.store.read(user, model.max_len + max(1, model.max_len // 8))
        if stored is None:
            raise HttpProblem(
                404,
                "unknown_user",
                "nothing is stored of this user; send a history, or behaviours to /v1/events",
            )
        first = window_start(stored.total + extra, stored.first, model.max_len)
        return stored.part(min(first, stored.total), stored.total)

    def _seen(self, model: ServedModel, history: StoredHistory, request: Any) -> Any:
        """A history as the model wants it. Stored behaviours with items it does not know are left
        out; sent ones are checked.
        """
        if request.history is None:
            mask = self._known(model, history.items)
            if not mask.all():
                actions = {name: values[mask] for name, values in history.actions.items()}
                history = StoredHistory(
                    history.first, history.items[mask], history.timestamps[mask], actions
                )
        return self._behaviours(
            history.items, history.timestamps, history.actions, request.features
        )


def sent_history(given: m.History) -> StoredHistory:
    """A history as it was sent, in arrays; `BadRequest` where lengths differ or time goes back."""
    items, timestamps = (
        np.array(given.items, dtype=np.int64),
        np.array(given.timestamps, dtype=np.int64),
    )
    if len(timestamps) != len(items):
        raise BadRequest(
            f"a history has {len(items)} items but {len(timestamps)} timestamps; send one for each"
        )
    if (timestamps[1:] < timestamps[:-1]).any():
        raise BadRequest("the timestamps of a history go back; send behaviours oldest first")
    actions = {name: np.array(values, dtype=np.float32) for name, values in given.actions.items()}
    for name, values in actions.items():
        if len(values) != len(items):
            raise BadRequest(
                f"action '{name}' has {len(values)} values for {len(items)} behaviours; send one "
                "for each"
            )
    return StoredHistory(0, items, timestamps, actions)


def _joined(stored: StoredHistory, recent: m.History | None) -> StoredHistory:
    """The behaviours after the prefix: newly stored ones, then those the request brings."""
    if recent is None:
        return stored
    sent = sent_history(recent)
    items, timestamps, actions = sent.items, sent.timestamps, sent.actions
    if not len(stored.items):
        return StoredHistory(stored.total, items, timestamps, actions)
    if len(timestamps) and timestamps[0] < stored.timestamps[-1]:
        raise BadRequest(
            "the recent behaviours are older than stored ones; send only what is not stored yet"
        )
    both = {
        name: np.concatenate([values, actions.get(name, np.zeros(len(items), dtype=np.float32))])
        for name, values in stored.actions.items()
    }
    return StoredHistory(
        stored.first,
        np.concatenate([stored.items, items]),
        np.concatenate([stored.timestamps, timestamps]),
        {**actions, **both},
    )


def _numbers(values: Any) -> list[float]:
    return values if isinstance(values, list) else np.asarray(values, dtype=np.float64).tolist()
