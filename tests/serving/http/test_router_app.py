"""The router against instances that misbehave: refuse, hang up, hang, drain, lie. Each a real
socket in this process.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from slipstream.serving.http.limits import Keys, Limits
from slipstream.serving.http.router_app import RouterSettings, build_router
from slipstream.serving.router.routing import Member, rendezvous
from slipstream.serving.router.ticket import TicketOffice

OFFICE = TicketOffice(b"a secret of sixteen bytes or more")
KEY = "0123456789abcdef"
RANK = {"user": "ann", "candidates": [1], "history": {"items": [1, 2, 3], "timestamps": [1, 2, 3]}}
Behaviour = Callable[["Fake", str, bytes, asyncio.StreamWriter], Awaitable[None]]


class Fake:
    """An instance whose answers a test decides; it notes what it was sent."""

    def __init__(self, name: str, behaviour: Behaviour) -> None:
        self.name, self.behaviour = name, behaviour
        self.asked: list[tuple[str, bytes, dict[str, str]]] = []
        self.draining, self.backlog = False, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                if path == "/v1/status":
                    status = {
                        "instance": self.name,
                        "version": "v",
                        "ready": not self.draining,
                        "draining": self.draining,
                    }
                    await reply(writer, 200, {**status, "backlog": self.backlog, "stats": {}})
                    continue
                self.asked.append((path, body, headers))
                await self.behaviour(self, path, body, writer)
        writer.close()


async def reply(writer: asyncio.StreamWriter, status: int, content: Any, **headers: str) -> None:
    body = json.dumps(content).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: "
        f"{len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()


async def well(fake: Fake, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 200, {"by": fake.name}, x_slipstream_backlog=str(fake.backlog))


async def hangs_up(fake: Fake, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hangs(fake: Fake, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def talks_nonsense(fake: Fake, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01 this is not HTTP\r\n\r\n")


async def is_draining(fake: Fake, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 503, {"error": "draining", "detail": "on the way out"})


class Face:
    """The router as its clients see it, without a socket between."""

    def __init__(self, app: Any, fakes: dict[str, Fake]) -> None:
        self.app, self.fakes = app, fakes
        self.router = app._app.router

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
            "raw_path": path.encode(),
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

    def order(self, user: str = "ann") -> list[Fake]:
        return [self.fakes[member.name] for member in rendezvous(user, self.router.routing.members)]


@contextlib.asynccontextmanager
async def face(count: int = 3, limits: Limits | None = None, **routing: Any) -> AsyncIterator[Face]:
    """A router over `count` fakes, probing as it does in life."""
    fakes = {f"i-{number}": Fake(f"i-{number}", well) for number in range(count)}
    servers = {
        name: await asyncio.start_server(fake.serve, "127.0.0.1", 0) for name, fake in fakes.items()
    }
    members = [
        Member(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for name, server in servers.items()
    ]
    settings = RouterSettings(probe_seconds=0.05, probe_timeout=0.2)
    app = build_router(
        members, OFFICE, Keys((KEY,)), limits or Limits(deadline_ms=2_000), settings, **routing
    )
    async with app._app._watched():
        shown = Face(app, fakes)
        shown.servers = servers  # type: ignore[attr-defined]
        yield shown
    for server in servers.values():
        server.close()


def test_the_users_instance_answers_and_the_bytes_arrive_untouched():
    async def work():
        async with face() as router:
            body = json.dumps(RANK, indent=3).encode() + b"  "
            assert await router.ask("/v1/rank", body, x_slipstream_deadline_ms="500") == (
                200,
                {"by": router.order()[0].name},
            )
            path, received, headers = router.order()[0].asked[0]
            assert (path, received) == ("/v1/rank", body)
            assert 0 < int(headers["x-slipstream-deadline-ms"]) <= 500
            assert KEY not in headers.values()  # a client's key is not the instances' business

    asyncio.run(work())


@pytest.mark.parametrize("fault", [hangs_up, talks_nonsense, is_draining])
def test_a_faulty_owner_costs_a_ranking_nothing(fault: Behaviour):
    async def work():
        async with face() as router:
            first, second = router.order()[:2]
            first.behaviour = fault
            for _ in range(5):
                assert await router.ask("/v1/rank", RANK) == (200, {"by": second.name})
            assert 1 <= len(first.asked) <= 3  # then the breaker is open, or the drain known

    asyncio.run(work())


def test_an_owner_that_is_gone_is_not_asked_and_is_found_again():
    async def work():
        async with face() as router:
            first, second = router.order()[:2]
            server = router.servers[first.name]
            port = server.sockets[0].getsockname()[1]
            server.close()
            first.behaviour = hangs_up
            assert await router.ask("/v1/rank", RANK) == (200, {"by": second.name})
            await asyncio.sleep(0.3)
            first.behaviour = well
            router.servers[first.name] = await asyncio.start_server(first.serve, "127.0.0.1", port)
            await asyncio.sleep(0.3)
            assert await router.ask("/v1/rank", RANK) == (200, {"by": first.name})

    asyncio.run(work())


def test_an_append_is_not_repeated_when_its_fate_is_unknown():
    async def work():
        async with face() as router:
            first = router.order()[0]
            first.behaviour = hangs_up
            status, problem = await router.ask(
                "/v1/events", {"user": "ann", "items": [1], "timestamps": [1]}
            )
            assert (status, problem["error"]) == (502, "instance_failed")
            assert [len(fake.asked) for fake in router.order()] == [1, 0, 0]

    asyncio.run(work())


def test_a_hanging_instance_is_left_at_the_deadline_and_then_avoided():
    async def work():
        async with face() as router:
            first, second = router.order()[:2]
            first.behaviour = hangs
            loop = asyncio.get_running_loop()
            began = loop.time()
            status, problem = await router.ask("/v1/rank", RANK, x_slipstream_deadline_ms="100")
            assert (status, problem["error"]) == (504, "deadline_passed")
            assert 0.09 < loop.time() - began < 0.6
            short = [router.ask("/v1/rank", RANK, x_slipstream_deadline_ms="50") for _ in range(5)]
            assert {status for status, _ in await asyncio.gather(*short)} == {504}
            assert (
                router.router.routing.by_name[first.name].breaker.failures == 0
            )  # hasty clients do not condemn an instance
            patient = [
                router.ask("/v1/rank", RANK, x_slipstream_deadline_ms="1000") for _ in range(3)
            ]
            assert {status for status, _ in await asyncio.gather(*patient)} == {504}
            assert await router.ask("/v1/rank", RANK, x_slipstream_deadline_ms="1000") == (
                200,
                {"by": second.name},
            )

    asyncio.run(work())


def test_a_ticket_leads_to_its_holder_wherever_the_hash_points():
    async def work():
        async with face() as router:
            last = router.order()[-1]
            ticket = OFFICE.issue("ann", last.name, "v", 0, 3)
            assert await router.ask("/v1/rank", {**RANK, "ticket": ticket}) == (
                200,
                {"by": last.name},
            )
            last.draining = True
            await asyncio.sleep(0.2)
            assert await router.ask("/v1/rank", {**RANK, "ticket": ticket}) == (
                200,
                {"by": router.order()[0].name},
            )
            status, problem = await router.ask("/v1/rank", {**RANK, "ticket": ticket[:-2] + "xx"})
            assert (status, problem["error"]) == (403, "ticket_invalid")

    asyncio.run(work())


def test_the_last_pages_ticket_leads_the_next_preinference_until_it_expires():
    async def work():
        async with face() as router:
            first, last = router.order()[0], router.order()[-1]
            asked = {"user": "ann", "history": RANK["history"]}
            ticket = OFFICE.issue("ann", last.name, "v", 0, 3)
            assert await router.ask("/v1/preinfer", {**asked, "ticket": ticket}) == (
                200,
                {"by": last.name},
            )
            stale = TicketOffice(b"a secret of sixteen bytes or more", lifetime=-1.0).issue(
                "ann", last.name, "v", 0, 3
            )
            assert await router.ask("/v1/preinfer", {**asked, "ticket": stale}) == (
                200,
                {"by": first.name},
            )
            status, problem = await router.ask("/v1/rank", {**RANK, "ticket": stale})
            assert (status, problem["error"]) == (410, "ticket_expired")
            status, problem = await router.ask(
                "/v1/preinfer", {**asked, "ticket": ticket[:-2] + "xx"}
            )
            assert (status, problem["error"]) == (403, "ticket_invalid")

    asyncio.run(work())


def test_a_loaded_owner_is_relieved_by_what_it_reports():
    async def work():
        async with face(slack_tokens=100) as router:
            first, second = router.order()[:2]
            first.backlog = 50_000
            await router.ask("/v1/rank", RANK)  # its answer tells the backlog
            assert await router.ask("/v1/preinfer", RANK) == (200, {"by": second.name})
            first.backlog = 0
            await asyncio.sleep(0.2)  # a probe tells that it is gone
            assert await router.ask("/v1/preinfer", RANK) == (200, {"by": first.name})

    asyncio.run(work())


def test_a_burst_on_one_user_is_spread_before_any_answer():
    async def slowly(fake: Fake, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await well(fake, path, body, writer)

    async def work():
        async with face(4, slack_tokens=0) as router:
            for fake in router.fakes.values():
                fake.behaviour = slowly
            answers = await asyncio.gather(*(router.ask("/v1/preinfer", RANK) for _ in range(40)))
            assert {status for status, _ in answers} == {200}
            assert max(len(fake.asked) for fake in router.fakes.values()) <= 1.25 * 40 / 4 + 1
            assert [member.outstanding for member in router.router.routing.members] == [0] * 4

    asyncio.run(work())


def test_nobody_left_is_a_503_with_a_hint():
    async def work():
        async with face(2) as router:
            for server in router.servers.values():
                server.close()
            for fake in router.fakes.values():
                fake.behaviour = hangs_up
            status, problem = await router.ask("/v1/rank", RANK)
            assert (status, problem["error"]) == (503, "unavailable")

    asyncio.run(work())


def test_too_many_requests_are_held_back_by_caller():
    async def work():
        async with face(1, Limits(requests_per_second=1.0, burst=3)) as router:
            statuses = [(await router.ask("/v1/rank", RANK))[0] for _ in range(5)]
            assert statuses == [200, 200, 200, 429, 429]

    asyncio.run(work())


def test_a_stored_user_is_asked_for_by_path():
    async def work():
        async with face() as router:
            owner = router.order("bo b")[0]
            status, answer = await router.ask("/v1/users/bo b", b"", "GET")
            assert (status, answer) == (200, {"by": owner.name})

    asyncio.run(work())
