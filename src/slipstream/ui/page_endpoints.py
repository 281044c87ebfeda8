"""The endpoints of the page's own process, as a table and as handlers.

Reading runs may take a while, so it happens in a thread, one request at a time. Touch this when the
page asks for something that no model answers.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from slipstream.serving.http import explore_messages as em
from slipstream.serving.http.endpoints import Endpoint
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.request_errors import BadRequest
from slipstream.ui import page_messages as pm
from slipstream.ui.run_records import RunRecords

Answer = TypeVar("Answer")
_NAME = {"type": "string", "maxLength": 1000}
_COUNT = {"type": "integer", "minimum": 0}
_STEPS = {"type": "integer", "minimum": 1, "maximum": 50, "default": 3}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 200, "default": 20}
PAGE_ENDPOINTS = (
    Endpoint(
        "page", "GET", "/v1/page", "What the web page can show here.",
        em.PageAnswer, roles=("page",),
    ),
    Endpoint(
        "runs", "GET", "/v1/runs", "The training runs below the directory that is shown.",
        pm.RunsAnswer, problems=(404, 503), roles=("page",),
    ),
    Endpoint(
        "run", "GET", "/v1/run", "One run: figures, recipe, curves, slices.",
        pm.RunAnswer, problems=(404, 503), roles=("page",), query={"run": _NAME},
    ),
    Endpoint(
        "trace", "GET", "/v1/trace", "What each lane of a run did in its last steps.",
        pm.TraceAnswer, problems=(404, 503), roles=("page",), query={"run": _NAME, "steps": _STEPS},
    ),
    Endpoint(
        "people", "GET", "/v1/people", "Users whose held-out behaviour is in a slice of a run.",
        pm.PeopleAnswer, problems=(404, 503), roles=("page",),
        query={"run": _NAME, "by": _NAME, "from": _COUNT, "to": _COUNT, "limit": _LIMIT},
    ),
    Endpoint(
        "scale", "POST", "/v1/simulate", "Simulate training schedules on a larger cluster.",
        pm.ScaleAnswer, pm.ScaleRequest, problems=(503, 504), roles=("page",), timed=True,
        example={"workers": 64, "schedules": ["serial", "nested"]},
    ),
)  # fmt: skip


class PageEndpoints:
    """Answers from the files of runs."""

    def __init__(self, page: em.PageAnswer, records: RunRecords | None) -> None:
        self._page, self._records = page, records
        self._reading = asyncio.Lock()

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of every endpoint by its name."""
        names = (endpoint.name for endpoint in PAGE_ENDPOINTS)
        return {name: getattr(self, name) for name in names}

    async def page(self, _message: None, context: RequestContext) -> em.PageAnswer:
        """Tell what can be shown."""
        return self._page

    async def runs(self, _message: None, context: RequestContext) -> pm.RunsAnswer:
        """List the runs."""
        return await self._read(lambda records: records.runs())

    async def run(self, _message: None, context: RequestContext) -> pm.RunAnswer:
        """Show one run."""
        name = _named(context, "run")
        return await self._read(lambda records: records.run(name))

    async def trace(self, _message: None, context: RequestContext) -> pm.TraceAnswer:
        """Show the last steps of a run's pipeline."""
        name, steps = _named(context, "run"), _whole(context, "steps", _STEPS)
        return await self._read(lambda records: records.trace(name, steps))

    async def people(self, _message: None, context: RequestContext) -> pm.PeopleAnswer:
        """List users of a slice."""
        name, by = _named(context, "run"), _named(context, "by")
        least, most = _whole(context, "from", _COUNT), _whole(context, "to", _COUNT)
        limit = _whole(context, "limit", _LIMIT)
        return await self._read(lambda records: records.people(name, by, least, most, limit))

    async def scale(self, request: pm.ScaleRequest, context: RequestContext) -> pm.ScaleAnswer:
        """Simulate schedules."""
        from slipstream.ui.scale_simulation import simulate_scale

        async with self._reading:
            return await asyncio.to_thread(simulate_scale, request)

    async def _read(self, work: Callable[[RunRecords], Answer]) -> Answer:
        if self._records is None:
            raise HttpProblem(
                404, "not_found", "no directory of runs was given; start `slipstream ui RUNS`"
            )
        async with self._reading:
            return await asyncio.to_thread(work, self._records)


def _named(context: RequestContext, name: str) -> str:
    value = context.query.get(name, "")
    if not 0 < len(value) <= 1_000:
        raise BadRequest(f"name {name} in the query, as /v1/runs lists it")
    return value


def _whole(context: RequestContext, name: str, schema: dict[str, Any]) -> int:
    """Read a whole number from the query, within the bounds of its schema."""
    text = context.query.get(name, str(schema.get("default", 0)))
    least, most = schema["minimum"], schema.get("maximum", 2**53)
    if not (text.isascii() and text.isdigit() and len(text) < 17 and least <= int(text) <= most):
        raise BadRequest(f"{name} is a whole number from {least} to {most}")
    return int(text)
