"""What people explore with one instance: its model, items, neighbours, explanations, users.

Touch this when one of these endpoints does something else; the computing is in
instance/exploration.py.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from slipstream.serving.http import explore_messages as em
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, RequestContext
from slipstream.serving.http.instance_lifecycle import InstanceLifecycle
from slipstream.serving.http.request_history import drop_unknown
from slipstream.serving.http.user_endpoints import UserEndpoints
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.tenants import list_users

if TYPE_CHECKING:  # a stand-in can be served without torch
    from slipstream.serving.instance.instance import Instance

DEFAULT_USERS, MAX_USERS = 20, 1_000


class ExploreEndpoints:
    """The endpoints that a person's questions go to."""

    def __init__(self, life: InstanceLifecycle, users: UserEndpoints) -> None:
        self._life, self._users = life, users

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of every endpoint by its name."""
        return {
            "model": self.model,
            "search": self.search,
            "items": self.items,
            "neighbours": self.neighbours,
            "explain": self.explain,
            "users": self.users,
        }

    async def model(self, _message: None, context: RequestContext) -> em.ModelAnswer:
        """Say what is served."""
        async with self._life.use() as instance:
            engine, items = instance.engine, instance.items
            return em.ModelAnswer(
                version=instance.version,
                name=engine.name,
                kind=engine.config.kind,
                task=engine.task,
                tasks=list(instance.tasks),
                items=len(items),
                max_len=instance.max_len,
                timed=instance.timed,
                repeats=not instance.rules.exclude_seen,
                titles=items.titled,
                shows=list(items.features),
                actions=list(instance.actions),
                features=list(engine.encoder.features),
                context=list(engine.encoder.context),
                figures=engine.figures,
            )

    async def search(self, request: em.SearchRequest, context: RequestContext) -> em.ItemsAnswer:
        """Find items by title or id."""
        async with self._life.use() as instance:
            # Off the event loop: a large catalogue takes a while.
            found = await asyncio.to_thread(instance.items.search, request.query, request.count)
            return _about(instance, found, request.show)

    async def items(self, request: em.ItemsRequest, context: RequestContext) -> em.ItemsAnswer:
        """Return titles and features of items."""
        async with self._life.use() as instance:
            rows = instance.items.find(request.items).tolist()
            pairs = list(zip(request.items, rows, strict=True))
            known = [item for item, row in pairs if row >= 0]
            answer = _about(instance, known, request.show)
            answer.unknown = [item for item, row in pairs if row < 0]
            return answer

    async def neighbours(
        self, request: em.NeighboursRequest, context: RequestContext
    ) -> em.ItemsAnswer:
        """Find the items most like one."""
        from slipstream.serving.instance.exploration import Exploration

        async with self._life.use() as instance:
            found, scores = await Exploration(instance).neighbours(
                request.item, request.count, context.deadline
            )
            answer = _about(instance, found, request.show)
            answer.scores = scores
            return answer

    async def explain(
        self, request: em.ExplainRequest, context: RequestContext
    ) -> em.ExplainAnswer:
        """Measure what each behaviour adds to a score."""
        from slipstream.serving.instance.exploration import Exploration

        async with self._life.use(request.user) as instance:
            task = task_of(instance, request.by)
            window, _ = await self._users.history(instance, request, context)
            history = drop_unknown(instance, window)
            started = time.perf_counter()
            found = await Exploration(instance).explain(
                history,
                request.item,
                task=task,
                behaviours=request.behaviours,
                deadline=context.deadline,
                request_time=request.request_time,
                context=request.context,
            )
            explained = history.items[found.first :].tolist()
            return em.ExplainAnswer(
                instance.items.originals(instance.items.find([request.item]))[0],
                task,
                found.score,
                explained,
                instance.items.titles(explained),
                found.without,
                [None if left is None else found.score - left for left in found.without],
                len(history),
                instance.version,
                self._life.name,
                1_000 * (time.perf_counter() - started),
            )

    async def users(self, _message: None, context: RequestContext) -> em.UsersAnswer:
        """List users of the history store."""
        limit, after = context.query.get("limit", str(DEFAULT_USERS)), context.query.get("after")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4):
            limit = "0"
        if not 1 <= int(limit) <= MAX_USERS:
            raise BadRequest(f"limit is a whole number from 1 to {MAX_USERS}")
        if after is not None and len(after) > m.MAX_ID_CHARACTERS:
            raise BadRequest(f"a user's id has at most {m.MAX_ID_CHARACTERS} characters")
        users = await list_users(self._users.store.users, context.tenant, after, int(limit))
        return em.UsersAnswer(users)


def task_of(instance: "Instance", by: str | None) -> str:
    """Return the task to order or explain by: the first one unless another is named."""
    if by is not None and by not in instance.tasks:
        raise BadRequest(
            f"'{by:.80}' is no task of this model; name one of {', '.join(instance.tasks)}"
        )
    return by if by is not None else instance.tasks[0]


def _about(instance: "Instance", items: list[m.Identity], show: list[str]) -> em.ItemsAnswer:
    """Return items with their titles and the features asked for."""
    ids = instance.items.originals(instance.items.find(items)) if items else []
    return em.ItemsAnswer(ids, instance.items.titles(ids), instance.items.shown(show, ids))
