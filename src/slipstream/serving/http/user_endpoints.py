"""What is stored of users: append, show, delete, and the history that a request is scored on.

A history is cut by the bundle's window rule (`history.window`), a stored one from numbers that
count from the first behaviour ever: what a request is scored on depends on the store alone, never
on the ticket. Touch this when histories are read or written in another way.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.history.history_store import KEEP, HistoryStore
from slipstream.history.user_history import History
from slipstream.serving.http import messages as m
from slipstream.serving.http.endpoints import BEHAVIOURS_HEADER
from slipstream.serving.http.explore_messages import ExplainRequest
from slipstream.serving.http.http_app import HttpProblem, RequestContext
from slipstream.serving.http.instance_lifecycle import InstanceLifecycle
from slipstream.serving.http.request_history import (
    check_times,
    read_history,
    refuse_long,
    select_actions,
    write_history,
)
from slipstream.serving.instance.request_stages import stage
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.tenants import outer_user

if TYPE_CHECKING:
    from slipstream.serving.instance.instance import Instance

HistoryRequest = m.PreinferRequest | m.RankRequest | m.RecommendRequest | ExplainRequest
STORE_SHARE = 0.8  # of the time left: then the store is too slow, and there is time to say so


class UserEndpoints:
    """The endpoints about one user's stored history."""

    def __init__(self, life: InstanceLifecycle, store: HistoryStore) -> None:
        self.life, self.store = life, store

    async def events(self, request: m.EventsRequest, context: RequestContext) -> m.EventsAnswer:
        """Append behaviours to the store."""
        now = int(time.time())
        times = request.timestamps if request.timestamps is not None else [now] * len(request.items)
        sent = read_history(
            m.HistoryMessage(request.items, times, request.actions, request.context)
        )
        check_times(times, now)
        history = replace(sent, items=self.life.instance.items.canonical(sent.items))
        seconds = store_seconds(context)
        with stage("store"):
            total = await self.store.append(request.user, history, request.after, seconds=seconds)
        self._tell_length(context, total)
        return m.EventsAnswer(total)

    async def user(self, _message: None, context: RequestContext) -> m.UserAnswer:
        """Show what is stored of a user."""
        user, limit = context.path["user"], context.query.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or int(limit) > 1000:
            raise BadRequest("limit is a whole number from 0 to 1000")
        return await self._stored(user, int(limit), context)

    async def export(self, _message: None, context: RequestContext) -> m.UserAnswer:
        """Show everything that is stored of a user."""
        return await self._stored(context.path["user"], KEEP, context, since=0)

    async def _stored(
        self, user: str, limit: int, context: RequestContext, since: int | None = None
    ) -> m.UserAnswer:
        stored = None
        if len(outer_user(user)) <= m.MAX_ID_CHARACTERS:
            seconds = store_seconds(context)
            stored = await self.store.read(user, limit, since, seconds=seconds)
        if stored is None:
            raise HttpProblem(
                404, "unknown_user", "nothing is stored of this user; send behaviours to /v1/events"
            )
        return m.UserAnswer(outer_user(user), stored.total, write_history(stored))

    async def delete(self, _message: None, context: RequestContext) -> m.DeleteAnswer:
        """Delete what is stored of a user, then the prefixes computed from it."""
        user = context.path["user"]
        if len(outer_user(user)) > m.MAX_ID_CHARACTERS:
            raise BadRequest(f"a user's id has at most {m.MAX_ID_CHARACTERS} characters")
        deleted = await self.store.delete(user, seconds=store_seconds(context))
        self._tell_length(context, 0)
        for instance in self.life.instances:
            await instance.forget(user, context.deadline)
        return m.DeleteAnswer(outer_user(user), deleted)

    def _tell_length(self, context: RequestContext, behaviours: int) -> None:
        """Tell routers how long a user's stored history is, as far as a request is scored on it."""
        length = min(behaviours, self.life.instance.rules.max_len)
        context.headers[BEHAVIOURS_HEADER] = str(length)

    async def history(
        self,
        instance: "Instance",
        request: HistoryRequest,
        context: RequestContext,
        extra: int = 0,
    ) -> tuple[History, np.ndarray]:
        """Return the window to score on, of the history sent or stored, and all items read of it.

        The window leaves room for `extra` behaviours that the request brings.
        """
        history = await self.read(instance, request, context)
        return window_of(instance, history, extra), history.items

    async def read(
        self,
        instance: "Instance",
        request: HistoryRequest,
        context: RequestContext,
        *,
        whole: bool = False,
        anybody: bool = False,
    ) -> History:
        """Return the history sent or stored, at least as much of it as a model sees.

        Of a stored history no more is read, unless `whole`. A user of whom nothing is stored is
        refused, or, with `anybody`, has an empty history.
        """
        if request.history is not None:
            history = read_history(request.history, request.features, instance.timed)
            if not isinstance(request, m.PreinferRequest):
                refuse_long(history, instance.max_len, request.allow_truncate)
            return history
        limit = KEEP if whole else instance.max_len
        seconds = store_seconds(context)
        since = 0 if whole else None
        with stage("store"):
            stored = await self.store.read(request.user, limit, since, seconds=seconds)
        if stored is None and not anybody:
            raise HttpProblem(
                404,
                "unknown_user",
                "nothing is stored of this user; send a history, or behaviours to /v1/events",
            )
        if stored is None:
            stored = read_history(m.HistoryMessage([], []))
        else:
            self._tell_length(context, stored.total)
        history = select_actions(stored, instance.actions)
        return replace(history, user_features=request.features) if request.features else history


def window_of(instance: "Instance", history: History, extra: int = 0) -> History:
    """Return the part of a history that the model sees, with room for `extra` behaviours."""
    first = instance.rules.window_start(history.total + extra, history.first)
    return history.part(min(first, history.total), history.total)


def store_seconds(context: RequestContext) -> float:
    """Return how long the store may take for a request."""
    return max(0.01, STORE_SHARE * (context.deadline - time.monotonic()))
