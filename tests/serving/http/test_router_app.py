"""The router against instances that misbehave: refuse, close, hang, drain.

Each instance is a real socket in this process, and the router probes it as it does in production.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from slipstream.serving.http.limits import Keys, Limits
from slipstream.serving.http.router_app import Router, build_router
from slipstream.serving.router import upstream
from slipstream.serving.router.balancer import InstanceState, LoadBalancer, instance_order
from slipstream.serving.router.ticket import TicketSigner

SECRET = b"a secret of sixteen bytes or more"
SIGNER = TicketSigner(SECRET)
KEY = "0123456789abcdef"
RANK = {"user": "ann", "candidates": [1], "history": {"items": [1, 2, 3], "timestamps": [1, 2, 3]}}
Behaviour = Callable[["FakeInstance", asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to connect."""
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 60.0)


class FakeInstance:
    """An instance whose answers a test decides; it keeps what it was sent."""

    def __init__(self, name: str) -> None:
        self.name, self.behaviour = name, answers
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        self.draining, self.backlog, self.port = False, 0, 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Refuse connections and close those that are open."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                if path == "/v1/status":
                    await reply(writer, 200, self._status())
                    continue
                self.requests.append((path, body, headers))
                await self.behaviour(self, writer)
        self._writers.discard(writer)
        writer.close()

    def _status(self) -> dict[str, Any]:
        state = {"ready": not self.draining, "draining": self.draining, "backlog": self.backlog}
        return {"instance": self.name, "version": "v", "stats": {}, **state}


async def reply(writer: asyncio.StreamWriter, status: int, content: Any, **headers: str) -> None:
    body = json.dumps(content).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: "
        f"{len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()


async def answers(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 200, {"by": fake.name}, x_slipstream_backlog=str(fake.backlog))


async def hangs_up(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hangs(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def talks_nonsense(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01 this is not HTTP\r\n\r\n")


async def drains(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    fake.draining = True
    await reply(writer, 503, {"error": "draining", "detail": "on the way out"})


class Face:
    """The router as its clients see it, without a socket between."""

    def __init__(self, app: Any, router: Router, fakes: dict[str, FakeInstance]) -> None:
        self.app, self.router, self.fakes = app, router, fakes

    async def ask(
        self, path: str, content: Any, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        pairs = [
            (b"x-api-key", KEY.encode()),
            *((name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()),
        ]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": b"",
            "headers": pairs,
            "client": ("127.0.0.1", 1),
        }
        sent: list[dict[str, Any]] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return waiting.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    def order(self, user: str = "ann") -> list[FakeInstance]:
        """The instances in the user's order."""
        ordered = instance_order(user, self.router.balancer.instances)
        return [self.fakes[instance.name] for instance in ordered]

    def never_answer(self, fake: FakeInstance) -> None:
        """Let every request to an instance time out at once, except probes."""
        upstream = self.router._upstreams[fake.name]
        answer = upstream.request

        async def request(request: bytes, seconds: float) -> Any:
            if request.startswith(b"GET /v1/status"):
                return await answer(request, seconds)
            raise TimeoutError

        upstream.request = request  # type: ignore[method-assign]

    def state(self, fake: FakeInstance) -> InstanceState:
        """What the router knows of an instance."""
        return self.router.balancer.by_name[fake.name]


@contextlib.asynccontextmanager
async def serving(
    count: int = 3, limits: Limits | None = None, **balancing: Any
) -> AsyncIterator[Face]:
    """A router over `count` fake instances. Its time limits are long: no test depends on them."""
    fakes = {f"i-{number}": FakeInstance(f"i-{number}") for number in range(count)}
    for fake in fakes.values():
        await fake.start()
    instances = [
        InstanceState(name, f"http://127.0.0.1:{fake.port}") for name, fake in fakes.items()
    ]
    for instance in instances:
        instance.breaker.cooldown = 3_600.0
    limits = limits or Limits(deadline_ms=60_000)
    balancer = LoadBalancer(instances, **balancing)
    router = Router(balancer, SIGNER, limits, probe_seconds=0.02, probe_timeout=60.0)
    async with router.probing():
        yield Face(build_router(router, Keys((KEY,)), limits), router, fakes)
    for fake in fakes.values():
        fake.stop()


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An asynchronous test as a plain one."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for a minute at most."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def forged(ticket: str) -> str:
    """Another text of the same form."""
    return ("B" if ticket[0] == "A" else "A") + ticket[1:]


@on_a_loop
async def test_the_users_instance_answers_and_the_bytes_arrive_unchanged():
    async with serving() as face:
        first = face.order()[0]
        body = json.dumps(RANK, indent=3).encode() + b"  "
        answer = await face.ask("/v1/rank", body, x_slipstream_deadline_ms="50000")
        assert answer == (200, {"by": first.name})
        path, received, headers = first.requests[0]
        assert (path, received) == ("/v1/rank", body)
        assert 0 < int(headers["x-slipstream-deadline-ms"]) <= 50_000
        assert KEY not in headers.values()  # the instances do not get the client's key


@pytest.mark.parametrize("fault", [hangs_up, talks_nonsense, drains])
@on_a_loop
async def test_a_failing_owner_costs_no_ranking(fault: Behaviour):
    async with serving() as face:
        first, second = face.order()[:2]
        first.behaviour = fault
        for _ in range(5):
            assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})
        assert 1 <= len(first.requests) <= 3  # then the breaker is open, or the drain is known


@on_a_loop
async def test_an_owner_that_is_gone_gets_no_request_until_a_probe_finds_it_again():
    async with serving() as face:
        first, second = face.order()[:2]
        first.stop()
        await until(lambda: not face.state(first).ready)
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})
        await first.start()
        await until(lambda: face.state(first).ready)
        assert await face.ask("/v1/rank", RANK) == (200, {"by": first.name})


@on_a_loop
async def test_an_append_is_not_repeated_when_it_may_have_been_stored():
    async with serving() as face:
        first = face.order()[0]
        first.behaviour = hangs_up
        append = {"user": "ann", "items": [1], "timestamps": [1]}
        status, problem = await face.ask("/v1/events", append)
        assert (status, problem["error"]) == (502, "instance_failed")
        assert [len(fake.requests) for fake in face.order()] == [1, 0, 0]


@on_a_loop
async def test_an_append_goes_to_the_next_instance_when_it_was_surely_not_sent():
    async with serving() as face:
        first, second = face.order()[:2]
        first.stop()
        append = {"user": "ann", "items": [1], "timestamps": [1]}
        # The connection of an earlier probe may end only now: then the outcome is open.
        await until(lambda: not face.state(first).ready)
        assert await face.ask("/v1/events", append) == (200, {"by": second.name})


@on_a_loop
async def test_a_hanging_instance_is_left_at_the_deadline():
    async with serving() as face:
        face.order()[0].behaviour = hangs
        status, problem = await face.ask("/v1/rank", RANK, x_slipstream_deadline_ms="300")
        assert (status, problem["error"]) == (504, "deadline_passed")


@on_a_loop
async def test_an_instance_that_times_out_is_avoided_but_short_deadlines_do_not_count():
    async with serving() as face:
        first, second = face.order()[:2]
        face.never_answer(first)
        for _ in range(5):
            status, _ = await face.ask("/v1/rank", RANK, x_slipstream_deadline_ms="400")
            assert status == 504
        assert face.state(first).breaker.failures == 0
        for _ in range(3):
            assert (await face.ask("/v1/rank", RANK))[0] == 504
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})


@on_a_loop
async def test_a_ticket_leads_to_its_holder_until_that_one_drains():
    async with serving() as face:
        first, last = face.order()[0], face.order()[-1]
        request = {**RANK, "ticket": SIGNER.issue("ann", last.name, "v", 0, 3)}
        assert await face.ask("/v1/rank", request) == (200, {"by": last.name})
        last.draining = True
        await until(lambda: face.state(last).draining)
        assert await face.ask("/v1/rank", request) == (200, {"by": first.name})


@on_a_loop
async def test_an_expired_ticket_is_ignored_by_preinference_and_refused_by_ranking():
    async with serving() as face:
        first, last = face.order()[0], face.order()[-1]
        request = {"user": "ann", "history": RANK["history"]}
        ticket = SIGNER.issue("ann", last.name, "v", 0, 3)
        stale = TicketSigner(SECRET, lifetime=-1.0).issue("ann", last.name, "v", 0, 3)
        answer = await face.ask("/v1/preinfer", {**request, "ticket": ticket})
        assert answer == (200, {"by": last.name})
        answer = await face.ask("/v1/preinfer", {**request, "ticket": stale})
        assert answer == (200, {"by": first.name})
        status, problem = await face.ask("/v1/rank", {**RANK, "ticket": stale})
        assert (status, problem["error"]) == (410, "ticket_expired")


@pytest.mark.parametrize("path", ["/v1/rank", "/v1/preinfer"])
@on_a_loop
async def test_a_forged_ticket_is_refused(path: str):
    async with serving() as face:
        request = RANK if path == "/v1/rank" else {"user": "ann", "history": RANK["history"]}
        ticket = SIGNER.issue("ann", "i-0", "v", 0, 3)
        status, problem = await face.ask(path, {**request, "ticket": forged(ticket)})
        assert (status, problem["error"]) == (403, "ticket_invalid")


@on_a_loop
async def test_an_owner_with_a_long_backlog_is_relieved_until_it_is_gone():
    async with serving(slack_tokens=100) as face:
        first, second = face.order()[:2]
        first.backlog = 50_000
        await face.ask("/v1/rank", RANK)  # its answer reports the backlog
        assert await face.ask("/v1/preinfer", RANK) == (200, {"by": second.name})
        first.backlog = 0
        await until(lambda: face.state(first).reported == 0)  # by a probe
        assert await face.ask("/v1/preinfer", RANK) == (200, {"by": first.name})


@on_a_loop
async def test_a_burst_of_one_user_spreads_before_any_answer():
    released = asyncio.Event()

    async def answers_late(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        await answers(fake, writer)

    async with serving(4, slack_tokens=0) as face:
        fakes = face.fakes.values()
        for fake in fakes:
            fake.behaviour = answers_late
        burst = [asyncio.create_task(face.ask("/v1/preinfer", RANK)) for _ in range(40)]
        await until(lambda: sum(len(fake.requests) for fake in fakes) == 40)
        assert max(len(fake.requests) for fake in fakes) <= 1.25 * 40 / 4 + 1
        released.set()
        assert {status for status, _ in await asyncio.gather(*burst)} == {200}
        assert [instance.outstanding for instance in face.router.balancer.instances] == [0] * 4


@on_a_loop
async def test_without_any_instance_the_answer_is_503():
    async with serving(2) as face:
        for fake in face.fakes.values():
            fake.stop()
        status, problem = await face.ask("/v1/rank", RANK)
        assert (status, problem["error"]) == (503, "unavailable")


@on_a_loop
async def test_the_rate_of_a_caller_is_limited():
    async with serving(1, Limits(deadline_ms=60_000, requests_per_second=1e-6, burst=3)) as face:
        statuses = [(await face.ask("/v1/rank", RANK))[0] for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]


@on_a_loop
async def test_a_stored_user_is_found_by_path():
    async with serving() as face:
        owner = face.order("bo b")[0]
        assert await face.ask("/v1/users/bo b", b"", "GET") == (200, {"by": owner.name})


@on_a_loop
async def test_readiness_needs_one_instance_and_no_drain():
    async with serving(2) as face:
        assert await face.ask("/readyz", b"", "GET") == (200, {"status": "ok"})
        status, answer = await face.ask("/admin/drain", {"instance": "nobody"})
        assert (status, answer["detail"]) == (
            404,
            "no instance is called 'nobody'; there are i-0, i-1",
        )
        assert await face.ask("/admin/drain", {}) == (200, {"draining": "router"})
        assert await face.ask("/readyz", b"", "GET") == (503, {"status": "draining"})
        assert (await face.ask("/v1/rank", RANK))[0] == 200  # what still comes is served


@on_a_loop
async def test_a_wrong_method_on_a_forwarded_path_is_405():
    async with serving(1) as face:
        assert (await face.ask("/v1/rank", b"", "GET"))[0] == 405
        assert (await face.ask("/v1/users/ann", b"", "POST"))[0] == 405
        assert (await face.ask("/v1/users/", b"", "GET"))[0] == 404


@on_a_loop
async def test_a_user_of_any_name_is_read_and_deleted_at_its_own_instance():
    async with serving(3) as face:
        for user in ("ann", "a/b", "ü ö", "a%2Fb", "..", "line\nbreak"):
            place = face.order(user)[0].name
            for method in ("GET", "DELETE"):
                path = f"/v1/users/{user}"
                assert await face.ask(path, b"", method) == (200, {"by": place}), (user, method)
                assert face.fakes[place].requests[-1][0] == quote(path)


@on_a_loop
async def test_an_empty_body_is_refused_with_an_example():
    async with serving(1) as face:
        for path in ("/v1/preinfer", "/v1/rank", "/v1/recommend", "/v1/events"):
            status, problem = await face.ask(path, b"")
            assert (status, problem["error"]) == (400, "bad_request")
            assert 'no body; send JSON like {"user": "ann"' in problem["detail"]
