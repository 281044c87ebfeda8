"""The client: messages out, answers and refusals in, over connections that are kept."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slipstream.serving.http.client import AsyncClient, Client, RefusalError, UnreachableError
from slipstream.serving.http.messages import Announcement

RANKED = {"scores": {"click": [0.5]}, "version": "v", "instance": "i-0", "hit": "device"}
RANKED |= {"truncated": False, "behaviours": 3}


class RecordingServer(ThreadingHTTPServer):
    """Answers every request with `answer` and keeps what it was sent."""

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: tuple[int, bytes] = (200, json.dumps(RANKED).encode())
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def get_request(self):
        self.connections += 1
        return super().get_request()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordingServer

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers, body))
        status, content = self.server.answer
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_call_sends_its_message_and_returns_the_answer(server: RecordingServer):
    with Client(server.url + "/", key="a key", deadline_ms=50_000) as client:
        answer = client.rank("ann", [1, 2], ticket="t", allow_truncate=True)
        assert (answer.scores, answer.hit) == ({"click": [0.5]}, "device")
        client.rank("ann", [1, 2])
    method, path, headers, body = server.requests[0]
    assert (method, path) == ("POST", "/v1/rank")
    assert (headers["x-api-key"], headers["x-slipstream-deadline-ms"]) == ("a key", "50000")
    sent = json.loads(body)
    assert (sent["user"], sent["candidates"], sent["ticket"]) == ("ann", [1, 2], "t")
    assert server.connections == 1


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [
        (lambda client: client.preinfer("ann"), "POST", "/v1/preinfer"),
        (lambda client: client.recommend("ann", 3), "POST", "/v1/recommend"),
        (lambda client: client.events("ann", [1], [2]), "POST", "/v1/events"),
        (lambda client: client.user("a/b ü", 5), "GET", "/v1/users/a%2Fb%20%C3%BC?limit=5"),
        (lambda client: client.delete("a/b?#%"), "DELETE", "/v1/users/a%2Fb%3F%23%25"),
        (lambda client: client.delete(".."), "DELETE", "/v1/users/.."),
        (lambda client: client.drain("i-0"), "POST", "/admin/drain"),
        (lambda client: client.reload("v2"), "POST", "/admin/reload"),
        (lambda client: client.metrics(), "GET", "/metrics"),
    ],
)
def test_a_refusal_is_an_error_with_status_code_and_sentence(server, call, method, path):
    server.answer = 409, b'{"error": "conflict", "detail": "that is older than stored"}'
    with Client(server.url) as client, pytest.raises(RefusalError, match="older than") as refused:
        call(client)
    assert (refused.value.status, refused.value.code) == (409, "conflict")
    assert server.requests[0][:2] == (method, path)
    assert "x-api-key" not in server.requests[0][2]


def test_a_refusal_that_is_not_ours_is_shown_as_it_came(server: RecordingServer):
    server.answer = 502, b"<html>a proxy's page</html>"
    with Client(server.url) as client, pytest.raises(RefusalError, match="a proxy's page"):
        client.metrics()


def test_no_server_is_an_error_that_says_what_to_check():
    sentence = "is `slipstream serve` running there"
    with Client("http://127.0.0.1:1") as client, pytest.raises(UnreachableError, match=sentence):
        client.rank("ann", [1])


def test_calls_of_an_asynchronous_client_run_at_the_same_time(server: RecordingServer):
    async def work() -> None:
        async with AsyncClient(server.url) as client:
            answers = await asyncio.gather(*(client.rank(f"u{n}", [1]) for n in range(10)))
            assert [answer.instance for answer in answers] == ["i-0"] * 10

    asyncio.run(work())
    assert {json.loads(body)["user"] for *_, body in server.requests} == {
        f"u{number}" for number in range(10)
    }


def test_what_is_worth_announcing_is_what_the_last_answer_said(server: RecordingServer):
    told = {"ticket": "t", "admitted": False, "reason": "gains_little", "instance": "i-0"}
    told |= {"version": "v", "behaviours": 3, "from_behaviours": 600}
    with Client(server.url) as client:
        assert client.worth_announcing(3)
        server.answer = 202, json.dumps(told).encode()
        client.preinfer("ann")
        assert not client.worth_announcing(599) and client.worth_announcing(600)
        answer = {"behaviours": 4, "preinfer": told | {"from_behaviours": 200}}
        server.answer = 200, json.dumps(answer).encode()
        client.events("ann", [1], preinfer=Announcement(rank_in_ms=120))
        assert not client.worth_announcing(199) and client.worth_announcing(200)
    assert json.loads(server.requests[1][3])["preinfer"]["rank_in_ms"] == 120
