"""Processor time per routed request: our router and sglang-router (sticky by key), in turns.

Both stand before the same workers. Touch this when a routed request carries something else.
"""

import asyncio
import contextlib
import secrets
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.router.peers import (
    HOW_TO_INSTALL,
    cpu_seconds,
    our_router,
    peer_command,
    peer_router,
    workers,
)
from slipstream.bench import harness
from slipstream.errors import SlipstreamError
from slipstream.serving.router.ticket import TicketSigner
from slipstream.serving.router.upstream import Upstream

CANDIDATES = 100
CONNECTIONS = 16
USERS = 64


def our_requests(port: int, secret: str) -> list[bytes]:
    """Make ranking requests as clients send them: key, ticket, candidates."""
    office = TicketSigner(secret.encode())
    found = []
    for user in _users():
        body = {
            "user": user,
            "candidates": _candidates(),
            "ticket": office.issue(user, "w-0", "v", 0, 100),
        }
        found.append(_request(port, "/v1/rank", body, "x-api-key: 0123456789abcdef"))
    return found


def peer_requests(port: int) -> list[bytes]:
    """Make generation requests with the same ids and the key that makes routing sticky."""
    body = {"input_ids": _candidates(), "stream": False}
    return [_request(port, "/generate", body, f"x-smg-routing-key: {user}") for user in _users()]


def _users() -> list[str]:
    return [f"user-{number}" for number in range(USERS)]


def _candidates() -> list[int]:
    return [1_000 + 37 * place for place in range(CANDIDATES)]


def _request(port: int, path: str, body: object, header: str) -> bytes:
    content = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: "
        f"application/json\r\n{header}\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


async def drive(port: int, requests: list[bytes], count: int) -> None:
    """Send requests over a few connections, each waiting for its answer, which must be a 200."""
    upstream = Upstream("127.0.0.1", port)
    numbers = iter(range(count))

    async def one_connection() -> None:
        for number in numbers:
            answer = await upstream.request(requests[number % len(requests)], 10.0)
            if answer.status != 200:
                raise SlipstreamError(f"a router answered {answer.status}: {answer.body[:200]!r}")

    await asyncio.gather(*(one_connection() for _ in range(CONNECTIONS)))
    upstream.close()


def run(quick: bool, json_path: Path | None) -> dict[str, object]:
    """Measure and print; the claim is `router_cpu_vs_peer`, where the peer is installed."""
    count, repeats = (1_000, 5) if quick else (5_000, 7)
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as running:
        ports = running.enter_context(workers(2))
        ours = running.enter_context(our_router(ports, secret))
        loads = {"slipstream": (ours, our_requests(ours[1], secret))}
        if peer_command() is None:
            Console().print(
                "sglang-router is not installed, so there is nothing to compare with; "
                f"{HOW_TO_INSTALL}",
                soft_wrap=True,
            )
        else:
            peer = running.enter_context(peer_router(ports))
            loads["sglang-router"] = (peer, peer_requests(peer[1]))
        samples: dict[str, list[float]] = {name: [] for name in loads}
        for repeat in range(-1, repeats):
            for name, ((pid, port), requests) in loads.items():
                before = cpu_seconds(pid)
                asyncio.run(drive(port, requests, count))
                if repeat >= 0:
                    samples[name].append((cpu_seconds(pid) - before) / count)
    rows = [
        {
            "variant": name,
            "cpu_us_per_request": 1e6 * harness.median(taken),
            "spread": harness.spread(taken),
            "requests": count * repeats,
            "samples": taken,
        }
        for name, taken in samples.items()
    ]
    claims = {}
    if "sglang-router" in samples:
        claims["router_cpu_vs_peer"] = harness.median(samples["slipstream"]) / harness.median(
            samples["sglang-router"]
        )
    return harness.finish("router", rows, claims, json_path)
