"""One real server under attack: attacks are refused, memory stays flat, honest users are served.

Attackers come from other addresses of loopback, so that limits per peer tell them apart. Attacks on
connections run all at once, in a process of their own (`benchmarks.attack.attackers`), while honest
users rank and check every score; each kind is one test of how its attempts ended.
"""

import asyncio
import contextlib
import json
import resource
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.attack.attackers import Attack, AttackPlan, AttackReport, start_attackers
from benchmarks.attack.honest import HonestWindow, arrivals, visit
from benchmarks.chaos.bench import FIRST_ID, NUM_ITEMS, visitors
from benchmarks.chaos.load import Visitor
from benchmarks.process_figures import MemoryWatch, children, resident_bytes
from benchmarks.served import ServedProcess, child_environment, served_process
from benchmarks.serving.bundle import random_bundle
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.client import Client, RefusalError
from tests.support.serve_command import ADMIN, KEY, LONG, figure
from tests.support.serving_fixtures import SMALL_MODEL

pytestmark = pytest.mark.system

SHOP, GREEDY = "a key of the tenant shop", "a key that asks too often"
GROWTH = 64 * 2**20  # bytes; the audit's attack took 165 MiB
HELD = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)  # files of the attackers
FLOOD_SECONDS = 50.0  # by then every attempt was ended by the server, on a busy machine too
FLOOD = [
    Attack("connections", "127.0.0.2", HELD),
    Attack("slow_head", "127.0.0.3", 30),
    Attack("slow_body", "127.0.0.4", 30),
    Attack("junk", "127.0.0.5", 100),
    Attack("header", "127.0.0.6", 1, header_bytes=96 * 2**20),
    Attack("no_key", "127.0.0.7", 100),
]
STATUSES = {
    "connections": {"503", "408"},
    "slow_head": {"408"},
    "slow_body": {"408"},
    "junk": {"400"},
    "header": {"431"},
    "no_key": {"401"},
}


@dataclass(frozen=True)
class Target:
    """A running server, its bundle, and users whose scores are known."""

    server: ServedProcess
    bundle: Path
    people: list[Visitor]

    @property
    def port(self) -> int:
        port = urlsplit(self.server.url).port
        assert port is not None
        return port

    def processes(self) -> list[int]:
        """The router and the instance; the spare process does nothing."""
        found = children(self.server.pid)
        return [found["router_process"][0], found["instance_process"][0]]

    def check(self, client: Client, ticket: str | None = None, number: int = 0) -> None:
        """A user is ranked, with the scores of the full pass."""
        visitor = self.people[number]
        answer = client.rank(visitor.user, visitor.candidates, visitor.history, ticket=ticket)
        assert answer.scores == visitor.expected


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("attacked") / "bundle"
    random_bundle(place, SMALL_MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05)
    return place


@pytest.fixture(scope="module")
def target(bundle: Path) -> Iterator[Target]:
    people = visitors(Engine(bundle), 12, 300)
    keys = bundle.parent / "keys"
    keys.touch(0o600)
    keys.write_text(f"{KEY}\n{SHOP} tenant=shop\n{GREEDY} rate=0.01\n")
    options = ("--deadline-ms", "60000", "--state", str(bundle.parent / "state"))
    options += ("--key-file", str(keys), "--burst", "3")
    with served_process(bundle, *options, admin_key=ADMIN) as server:
        yield Target(server, bundle, people)


def events(client: Client, name: str) -> float:
    """How often the router counted an event."""
    lines = [line for line in client.metrics().splitlines() if f'event="{name}"' in line]
    return figure("\n".join(lines), "slipstream_router_events_total")


@dataclass(frozen=True)
class Flood:
    """What happened during the attacks on connections."""

    report: AttackReport
    honest: HonestWindow
    before: list[int]  # bytes of the router and the instance
    during: list[list[int]]
    refused_peers: float  # as the router counted them
    most_open: float


@pytest.fixture(scope="module")
def flood(target: Target) -> Flood:
    with Client(target.server.url, KEY) as client:
        for number in range(len(target.people)):
            target.check(client, number=number)
        pids = target.processes()
        before = [resident_bytes(pid) for pid in pids]
        during: list[list[int]] = [[] for _ in pids]
        plan = AttackPlan(target.port, FLOOD_SECONDS, FLOOD, KEY)
        with contextlib.ExitStack() as stack:
            for pid, samples in zip(pids, during, strict=True):
                stack.enter_context(MemoryWatch(pid, samples, 0.1))
            attackers = stack.enter_context(start_attackers(plan))
            honest, most_open = asyncio.run(_visits(target, lambda: attackers.running, client))
            report = attackers.report()
        refused = events(client, "connections_refused_peer")
    return Flood(report, honest, before, during, refused, most_open)


async def _visits(
    target: Target, attacked: Callable[[], bool], client: Client
) -> tuple[HonestWindow, float]:
    """Honest users rank as long as the attack goes on; also, how many connections were open."""
    whole, most_open = HonestWindow(), 0.0
    while attacked():
        part = await visit(target.server.url, KEY, target.people, arrivals(10, 1.0))
        whole.seconds += part.seconds
        whole.failures += part.failures
        whole.tally.answered += part.tally.answered
        whole.tally.wrong += part.tally.wrong
        text = await asyncio.to_thread(client.metrics)
        most_open = max(most_open, figure(text, "slipstream_router_connections"))
    return whole, most_open


@pytest.mark.parametrize("kind", STATUSES)
def test_every_attempt_is_refused(flood: Flood, kind: str):
    tally = flood.report.tallies[kind]  # type: ignore[index]
    wanted = next(attack.count for attack in FLOOD if attack.kind == kind)
    assert (tally.refused, tally.attempts) == (wanted, wanted)
    assert set(tally.endings) <= STATUSES[kind]


def test_of_ten_thousand_connections_few_are_held(flood: Flood):
    assert flood.refused_peers > 0.9 * (HELD - 256)
    assert 0 < flood.most_open < 1_000
    assert flood.report.tallies["connections"].endings["408"] >= 256  # held, then ended


def test_honest_users_are_served_with_exact_scores_meanwhile(flood: Flood):
    assert flood.honest.failures == []
    assert flood.honest.tally.answered > 50
    assert flood.honest.tally.wrong == 0


def test_memory_stays_flat(flood: Flood):
    for before, during in zip(flood.before, flood.during, strict=True):
        assert during and max(during) - before < GROWTH


# One request at a time


def raw(port: int, request: bytes, source: str = "127.0.0.2") -> tuple[int, bytes]:
    """Send bytes as they are; the status and the body of the answer."""
    with socket.create_connection(("127.0.0.1", port), LONG, source_address=(source, 0)) as asking:
        asking.sendall(request)
        answer = b"".join(iter(lambda: asking.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def request(method: str, path: str, *headers: str, host: str = "localhost") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "connection: close", *headers]
    if method == "POST":
        lines += ["content-length: 2", "", "{}"]
    else:
        lines += ["", ""]
    return "\r\n".join(lines).encode()


JSON = "content-type: application/json"
ADMIN_PATHS = ("drain", "undrain", "reload", "traffic", "rollback", "kill")


def test_forged_and_foreign_tickets_are_counted_and_lead_nowhere(target: Target):
    """A ticket only says where a prefix may be: a request with a bad one is ranked without it."""
    with Client(target.server.url, KEY) as client:
        ann = target.people[-1]
        ticket = client.preinfer(ann.user, ann.history).ticket
        before = events(client, "ticket_invalid")
        middle = len(ticket) // 2
        swapped = "A" if ticket[middle] != "A" else "B"
        bad = [
            ticket[:middle] + swapped + ticket[middle + 1 :],
            secrets.token_urlsafe(64),
            "A" * 512,
            "../../../etc/passwd",
        ]
        for forged in bad:
            target.check(client, forged, number=-1)
        target.check(client, ticket, number=-2)  # another user's
        assert events(client, "ticket_invalid") == before + len(bad) + 1
        target.check(client, ticket, number=-1)
        assert events(client, "ticket_invalid") == before + len(bad) + 1


@pytest.mark.parametrize("name", ADMIN_PATHS)
def test_a_clients_key_is_no_operators(target: Target, name: str):
    asked = request("POST", f"/admin/{name}", JSON, f"x-api-key: {KEY}")
    status, body = raw(target.port, asked)
    assert (status, json.loads(body)["error"]) == (403, "forbidden")
    assert raw(target.port, request("POST", f"/admin/{name}", JSON))[0] == 401
    with Client(target.server.url, KEY) as client:
        target.check(client)


def test_a_tenants_key_sees_no_other_users(target: Target):
    first = target.people[0].candidates[0]
    actions = {name: [1.0] for name in ("click", "like")}
    with Client(target.server.url, KEY) as client, Client(target.server.url, SHOP) as shop:
        client.events("ann of nobody", [first], [1], actions=actions)
        for asked in (shop.user, shop.export):
            with pytest.raises(RefusalError) as refused:
                asked("ann of nobody")
            assert refused.value.status == 404
        shop.delete("ann of nobody")
        shop.events("ann of nobody", [first, first], [1, 2], actions={"click": [1, 1]})
        assert client.user("ann of nobody").behaviours == 1
        assert shop.user("ann of nobody").behaviours == 2
        client.events("bob of nobody", [first], [1], actions=actions)
        assert shop.users().users == ["ann of nobody"]
        assert "bob of nobody" in client.users().users
        with pytest.raises(RefusalError) as refused:
            shop.metrics()
        assert refused.value.status == 403


def test_a_key_above_its_rate_is_refused_and_counted_and_others_are_served(target: Target):
    with Client(target.server.url, KEY) as client, Client(target.server.url, GREEDY) as greedy:
        for _ in range(3):  # the burst
            target.check(greedy)
        for _ in range(5):
            with pytest.raises(RefusalError) as refused:
                target.check(greedy)
            assert (refused.value.status, refused.value.code) == (429, "rate_limited")
            target.check(client)
        counted = 'slipstream_answers_total{endpoint="rank",status="429"} 5.0'
        assert counted in client.metrics()


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/ui/../../../../../etc/passwd",
        "/ui/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/ui/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/ui//etc/passwd",
        "/ui/../bundle/bundle.json",
        "/v1/users/..%2f..%2fadmin%2fversions",
        "/v1/users/../../admin/versions",
        "/v1/export/%2e%2e%2f%2e%2e%2fhistory.db",
        "/v1/users/%00",
    ],
)
def test_no_path_leads_to_a_file_or_past_the_keys(target: Target, path: str):
    for headers in ((), (f"x-api-key: {KEY}",)):
        status, body = raw(target.port, request("GET", path, *headers))
        assert 400 <= status < 500
        assert set(json.loads(body)) == {"error", "detail"}
        assert b"root:" not in body and b"recipe" not in body


def test_users_named_like_paths_are_names(target: Target):
    first = target.people[0].candidates[0]
    actions = {name: [1.0] for name in ("click", "like")}
    with Client(target.server.url, KEY) as client:
        client.events("../../../etc/x", [first], [1], actions=actions)
        assert client.user("../../../etc/x").recent.items == [first]
        with pytest.raises(RefusalError) as refused:
            client.user("x")
        assert refused.value.status == 404


def test_a_server_without_keys_answers_its_own_pages_only(bundle: Path):
    """What a foreign page makes a browser on this machine send, and a name that leads here."""
    options = ("--history", f"sqlite:{bundle.parent / 'open.db'}")
    state = ("--state", str(bundle.parent / "state"))
    with served_process(bundle, *options, *state) as server, Client(server.url) as client:
        port = urlsplit(server.url).port
        assert port is not None
        plain = "content-type: text/plain"
        for name in ADMIN_PATHS:
            foreign = request("POST", f"/admin/{name}", JSON, "origin: http://evil.example")
            assert raw(port, foreign)[0] == 403
            assert raw(port, request("POST", f"/admin/{name}", JSON, "origin: null"))[0] == 403
            assert raw(port, request("POST", f"/admin/{name}", plain))[0] == 415
            rebound = request("POST", f"/admin/{name}", JSON, host="evil.example")
            assert raw(port, rebound)[0] == 403
        assert raw(port, request("GET", "/v1/model", host=f"evil.example:{port}"))[0] == 403
        assert raw(port, request("GET", "/v1/model", host=f"localhost:{port}"))[0] == 200
        assert [record.stable for record in client.versions().instances.values()] != []


# Bundles


def change_format(content: bytes) -> bytes:
    return content.replace(b'"format": 3', b'"format": 2', 1)


def change_heads(content: bytes) -> bytes:
    return content.replace(b'"heads": 2', b'"heads": 1', 1)


def flip(place: float) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        at = int(place * len(content))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return change


TAMPERED = {
    "config": ("bundle.json", change_heads),
    "format": ("bundle.json", change_format),
    "vocabulary": ("items.arrow", flip(0.5)),
    "weights": ("weights.safetensors", flip(0.9)),
    "digests": ("blocks.safetensors", flip(0.99)),
}


def tamper(bundle: Path, kind: str) -> None:
    name, change = TAMPERED[kind]
    content = (bundle / name).read_bytes()
    assert change(content) != content
    (bundle / name).write_bytes(change(content))


@pytest.mark.parametrize("kind", ["config", "weights"])  # every kind: at the reload below
def test_a_bundle_with_a_changed_byte_is_not_served(bundle: Path, tmp_path: Path, kind: str):
    changed = tmp_path / "bundle"
    shutil.copytree(bundle, changed)
    tamper(changed, kind)
    words = [sys.executable, "-m", "slipstream", "serve", str(changed), "--port", "0"]
    ended = subprocess.run(
        [*words, "--state", str(tmp_path / "state")],
        env=child_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert ended.returncode == 1
    said = ended.stderr.strip().splitlines()[0]
    assert said.startswith("error: ") and "was changed after it was written" in said
    assert TAMPERED[kind][0] in said and "export the bundle again" in said
    assert "Traceback" not in ended.stderr
    assert "is ready" not in ended.stdout


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_reload_of_a_changed_bundle_is_refused_and_the_old_one_serves_on(
    target: Target, tmp_path: Path, kind: str
):
    kept = tmp_path / "kept"
    target.bundle.rename(kept)
    try:
        random_bundle(
            target.bundle, SMALL_MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05, seed=1
        )
        tamper(target.bundle, kind)
        with Client(target.server.url, ADMIN) as admin, Client(target.server.url, KEY) as client:
            with pytest.raises(RefusalError, match="changed after it was written"):
                admin.reload()
            target.check(client)
    finally:
        shutil.rmtree(target.bundle)
        kept.rename(target.bundle)
