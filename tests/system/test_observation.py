"""A running server as an operator sees it: logs, request ids, traces, metrics of all routers.

One server of two routers and two instances, started from a settings file by the command.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.bundle import random_bundle
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import HistoryMessage
from tests.support.serve_command import ADMIN, KEY, LONG, figure
from tests.support.serving_fixtures import wait_until
from tests.support.span_receiver import Receiver

MODEL = {"kind": "hstu", "dim": 16, "blocks": 2, "heads": 2, "max_len": 512, "time_buckets": 32}
ACTIONS = {"click": [0.0] * 3, "like": [0.0] * 3}
HISTORY = HistoryMessage([1, 2, 3], [10, 20, 30], ACTIONS)
SENT = {"items": [1, 2, 3], "timestamps": [10, 20, 30], "actions": ACTIONS}
RANK = {"user": "ann the first", "candidates": [1, 2], "history": SENT}
TRACE = "ab" * 16


class Server:
    """The command, what it logged so far, and where its spans go."""

    def __init__(self, place: Path) -> None:
        random_bundle(place / "bundle", MODEL, num_items=1_000, first_id=0)
        self.receiver, self.place = Receiver(), place
        (place / "serve.yaml").write_text(
            f"bundle: {place / 'bundle'}\nport: 0\nrouters: 2\ninstances: 2\n"
            f"history: sqlite:{place / 'history.db'}\nstate: {place / 'state'}\n"
            f"deadline-ms: 30000\nlog-format: json\nlog-requests: all\n"
            f"traces: {self.receiver.url}\ntrace-share: 0.0\nslo-ms: 50\ndevice-mb: 64\n"
        )
        self._out = (place / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "serve", "--settings", str(place / "serve.yaml")],
            env={**os.environ, "SLIPSTREAM_API_KEY": KEY, "SLIPSTREAM_ADMIN_KEY": ADMIN},
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )
        wait_until(lambda: len(self.said("is ready")) == 4, LONG)
        found = re.search(r"http://[0-9.:]+", self.said("serving")[0])
        assert found is not None
        self.url = found.group()

    def lines(self) -> list[dict[str, Any]]:
        text = (self.place / "log").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def said(self, words: str) -> list[str]:
        return [line["message"] for line in self.lines() if words in line["message"]]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(LONG) == 0
        finally:
            self.process.kill()
            self._out.close()
            self.receiver.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("observed"))
    yield started
    started.close()


async def post(server: Server, path: str, message: Any, **headers: str) -> Any:
    sent = {"x-api-key": KEY, **{name.replace("_", "-"): text for name, text in headers.items()}}
    async with (
        aiohttp.ClientSession(headers=sent) as session,
        session.post(server.url + path, json=message) as answer,
    ):
        return answer.status, answer.headers, await answer.json()


def test_a_request_is_known_by_its_id_in_answer_logs_and_trace(server: Server):
    parent = f"00-{TRACE}-{'cd' * 8}-01"
    status, headers, answer = asyncio.run(
        post(server, "/v1/rank", RANK, x_request_id="abc-1", traceparent=parent)
    )
    assert status == 200 and headers["x-request-id"] == "abc-1"
    assert re.search(r"rank;dur=\d", headers["server-timing"])

    def logged() -> list[dict[str, Any]]:
        return [line for line in server.lines() if line.get("request_id") == "abc-1"]

    wait_until(lambda: len(logged()) > 0, LONG)
    (line,) = logged()
    assert line["process"].startswith("router-") and line["endpoint"] == "rank"
    assert (line["status"], line["hit"]) == (200, answer["hit"])
    assert line["instance"] == answer["instance"] and line["rank_ms"] <= line["ms"]
    assert re.fullmatch(r"[0-9a-f]{16}", line["user_hash"])
    assert not [each for each in server.lines() if "ann the first" in str(each)]

    def of_trace() -> list[tuple[str, Any]]:
        return [each for each in server.receiver.spans if each[1].trace_id.hex() == TRACE]

    wait_until(lambda: {name.partition("-")[0] for name, _ in of_trace()} == {"router", "i"}, LONG)
    spans = [span for _, span in of_trace()]
    routed = next(span for span in spans if span.parent_span_id.hex() == "cd" * 8)
    served = next(span for span in spans if span.parent_span_id == routed.span_id)
    assert "rank" in {span.name for span in spans if span.parent_span_id == served.span_id}


def test_every_line_of_the_log_has_time_level_and_process(server: Server):
    for line in server.lines():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z", line["time"])
        assert line["level"] in ("debug", "info", "warning", "error") and line["process"]


def test_metrics_are_those_of_all_routers_typed_and_explained(server: Server):
    for number in range(30):  # each on a connection of its own, so both routers serve some
        with Client(server.url, KEY) as client:
            client.rank(f"user {number}", [1], HISTORY)
    texts: list[str] = []

    def all_counted() -> bool:
        with Client(server.url, KEY) as client:
            texts.append(client.metrics())
        counted = re.findall(r'answers_total{endpoint="rank",status="200"} (\S+)', texts[-1])
        hits = figure(texts[-1], "slipstream_instance_hits_total")
        return sum(map(float, counted)) >= 30 and hits >= 30

    wait_until(all_counted, LONG)
    for family in text_string_to_metric_families(texts[-1]):
        assert family.documentation.endswith("."), family.name
        assert not family.documentation.startswith("The server's figure"), family.name
        counted = all(sample.name.endswith("_total") for sample in family.samples)
        assert (family.type == "counter") == counted, family.name


def test_drains_reloads_and_restarts_are_logged(server: Server):
    with Client(server.url, ADMIN) as client:
        client.drain("i-1")
        wait_until(lambda: bool(server.said("i-1 drains")), LONG)
        bundle = server.place / "bundle"
        random_bundle(bundle, MODEL, num_items=1_000, first_id=0, seed=1, noise=0.05)
        client.reload()
    wait_until(lambda: bool(server.said("serving version")), LONG)
    assert server.said("is open and warm") and server.said("i-0 serves version")
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    for word in children.read_text().split():
        with contextlib.suppress(OSError):
            if b"router_process" in Path(f"/proc/{word}/cmdline").read_bytes():
                os.kill(int(word), signal.SIGKILL)
                break
    wait_until(lambda: bool(server.said("is ready again")), LONG)


def test_the_work_of_a_client_that_goes_is_cancelled(server: Server):
    items = list(range(500))
    history = {"items": items, "timestamps": items, "actions": dict.fromkeys(ACTIONS, [0.0] * 500)}
    body = json.dumps({"user": "gone", "candidates": list(range(1_000)) * 10, "history": history})
    head = (
        f"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")

    def gone() -> bool:
        """Send work of half a second, and go: the router sees it, and so does the instance."""
        with socket.create_connection((host, int(port)), LONG) as connection:
            connection.sendall((head + body).encode())
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.05)
                connection.recv(1)
        with Client(server.url, KEY) as client:
            text = client.metrics()
        return 'reason="client_gone"' in text and 'status="499"' in text

    wait_until(gone, LONG)
