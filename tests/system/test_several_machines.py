"""Two machines (network namespaces), a router on one, instances on both, histories in Redis.

Machine b runs instances only. The tests share the machines and run in their order: the last one
ends machine b.
"""

import http.client
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.pipeline.link import joined_namespaces
from slipstream.errors import SlipstreamError
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.client import Client, RefusalError
from slipstream.serving.http.messages import RankAnswer
from slipstream.serving.router.hashing import rendezvous_first, seed_of
from tests.support.machines import ADDRESSES, ServeProcess, inside, serve_on, why_no_machines
from tests.support.redis_server import redis_server
from tests.support.serve_command import ADMIN, KEY, LONG
from tests.support.served_scores import full_pass
from tests.support.serving_fixtures import wait_until
from tests.support.serving_samples import candidates, engine, history

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(why_no_machines()), reason=why_no_machines() or "it runs"),
]
CLUSTER_KEY = "the key that the machines of this test share"
REDIS_PORT, FIRST_PORT = 6390, 9000
USERS = [f"user-{number}" for number in range(24)]
WANTED = candidates(30).tolist()
SMALL = ("--device-mb", "16", "--host-mb", "16")


@dataclass
class TwoMachines:
    """What the tests share: namespaces, deployments, the peers file, the scores that are right."""

    names: list[str]
    card: str  # of machine b
    place: Path
    a: ServeProcess
    b: ServeProcess
    peers: Path
    expected: dict[str, dict[str, list[float]]]

    def list_peers(self, *numbers: int) -> None:
        """Put the peers file in place: these instances of machine b."""
        write_peers(self.peers, numbers)

    def fleet(self, client: Client) -> dict[str, str]:
        return {each.name: each.state for each in client.fleet().instances}

    def check(self, user: str, answer: RankAnswer) -> None:
        """Compare scores with the full pass; in a batch with others the last bit may differ."""
        for task, expected in self.expected[user].items():
            assert answer.scores[task] == pytest.approx(expected, abs=1e-6), (user, answer.instance)

    def rank_all(self, client: Client) -> dict[str, str]:
        """Rank every user, check every score, and return who served them."""
        served = {}
        for user in USERS:
            answer = client.rank(user, WANTED)
            self.check(user, answer)
            served[user] = answer.instance
        return served


def write_peers(path: Path, numbers: tuple[int, ...]) -> None:
    peers = [
        {"name": f"b-i-{number}", "url": f"http://{ADDRESSES[1]}:{FIRST_PORT + number}"}
        for number in numbers
    ]
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(peers, indent=1))  # JSON is YAML
    beside.replace(path)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    place = tmp_path_factory.mktemp("machines")
    model = engine(place, max_len=400)
    (bundle,) = (path for path in place.iterdir() if (path / "bundle.json").exists())
    peers = place / "peers.yaml"
    write_peers(peers, (0,))
    bind = ("--bind", "127.0.0.1", ADDRESSES[0], "--protected-mode", "no")
    store = ("--history", f"redis://{ADDRESSES[0]}:{REDIS_PORT}/0")
    listen = ("--routers", "0", "--listen-instances", f"{ADDRESSES[1]}:{FIRST_PORT}")
    of_b = (str(bundle), *store, *SMALL, "--instances", "2", "--machine", "b", *listen)
    of_a = (str(bundle), *store, *SMALL, "--port", "0", "--machine", "a", "--peers", str(peers))
    with (
        joined_namespaces() as link,
        inside(link.names[0]),
        redis_server(place, REDIS_PORT, *bind),
        serve_on(link.names[1], place, "b", CLUSTER_KEY, *of_b) as b,
        serve_on(link.names[0], place, "a", CLUSTER_KEY, *of_a) as a,
    ):
        b.wait_for("b-i-. is ready", 2)
        a.wait_for("router-0 is ready")
        expected = append_histories(a.url, model)
        yield TwoMachines(link.names, link.cards[1], place, a, b, peers, expected)


def append_histories(url: str, model: Engine) -> dict[str, dict[str, list[float]]]:
    """Append a history of every user; return the scores of the full pass."""
    expected = {}
    with Client(url, KEY, deadline_ms=1_000 * LONG) as client:
        for number, user in enumerate(USERS):
            whole = history(60 + number, seed=number, age=0)
            actions = {name: values.tolist() for name, values in whole.actions.items()}
            items, times = whole.items.tolist(), whole.timestamps.tolist()
            client.events(user, items, times, actions=actions)
            expected[user] = full_pass(model, whole, WANTED)
    return expected


@pytest.fixture
def client(machines: TwoMachines) -> Iterator[Client]:
    """A client of the router; the peers are those of the beginning, whatever a test left."""
    machines.list_peers(0)
    with Client(machines.a.url, ADMIN, deadline_ms=1_000 * LONG) as client:
        wait_until(lambda: "b-i-1" not in machines.fleet(client), LONG)
        yield client


def first_of(user: str, *names: str) -> str:
    return rendezvous_first(user, names, seed_of)


class Load:
    """Users that are ranked again and again in a thread, in the namespace that starts it."""

    def __init__(self, machines: TwoMachines) -> None:
        self._machines, self.rounds = machines, 0
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Client(self._machines.a.url, KEY, deadline_ms=1_000 * LONG) as client:
            while not self._stop.is_set():
                try:
                    self._machines.rank_all(client)
                    self.rounds += 1
                except (SlipstreamError, AssertionError) as error:
                    self.failures.append(str(error))

    def go_on(self) -> None:
        """Wait until every user was ranked once more from now on."""
        end = self.rounds + 2
        wait_until(lambda: self.rounds >= end or bool(self.failures), 2 * LONG)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._stop.set()
        self._thread.join(2 * LONG)


def test_users_get_exact_scores_on_the_machine_of_their_instance(
    machines: TwoMachines, client: Client
):
    wait_until(lambda: machines.fleet(client) == {"a-i-0": "ready", "b-i-0": "ready"}, LONG)
    served = machines.rank_all(client)
    assert served == {user: first_of(user, "a-i-0", "b-i-0") for user in USERS}
    assert set(served.values()) == {"a-i-0", "b-i-0"}


def test_a_router_alone_finds_instances_by_name_and_honours_tickets_of_the_others(
    machines: TwoMachines, client: Client
):
    user = next(user for user in USERS if first_of(user, "a-i-0", "b-i-0") == "b-i-0")
    early = client.preinfer(user)
    words = ("--instances", "0", "--port", "0", "--machine", "c")
    name = ("--peers", f"dns:{ADDRESSES[1]}:{FIRST_PORT}", "--peers", str(machines.peers))
    with serve_on(machines.names[0], machines.place, "c", CLUSTER_KEY, *words, *name) as c:
        c.wait_for("router-0 is ready")
        with Client(c.url, ADMIN, deadline_ms=1_000 * LONG) as other:
            address = f"{ADDRESSES[1]}:{FIRST_PORT}"
            wait_until(lambda: machines.fleet(other).get(address) == "ready", LONG)
            late = other.rank(user, WANTED, ticket=early.ticket)
            assert late.instance == "b-i-0"
            machines.check(user, late)
            assert 'event="ticket_invalid"} 0' in other.metrics()


def test_a_peer_joins_and_leaves_under_load_and_no_request_is_lost(
    machines: TwoMachines, client: Client
):
    with Load(machines) as load:
        load.go_on()
        machines.list_peers(0, 1)
        wait_until(lambda: machines.fleet(client).get("b-i-1") == "ready", LONG)
        load.go_on()
        served = machines.rank_all(client)
        names = ("a-i-0", "b-i-0", "b-i-1")
        assert served == {user: first_of(user, *names) for user in USERS}
        assert 'instance="b-i-1"' in client.metrics()
        machines.list_peers(0)
        wait_until(lambda: "b-i-1" not in machines.fleet(client), LONG)
        load.go_on()
    assert load.failures == []
    assert 'router_instance_ready{instance="b-i-1"' not in client.metrics()
    assert set(machines.rank_all(client).values()) == {"a-i-0", "b-i-0"}


def test_a_damaged_peers_file_changes_nothing_and_is_said_once(
    machines: TwoMachines, client: Client
):
    machines.peers.write_text('- {name: b-i-0, url: "http://10')
    machines.a.wait_for("is not a list of peers.*the last good list stays in use")
    os.kill(_router_pid(machines.a), signal.SIGKILL)  # the next one has the list all the same
    machines.a.wait_for("router-0 is ready again")
    wait_until(lambda: machines.fleet(client) == {"a-i-0": "ready", "b-i-0": "ready"}, LONG)
    assert set(machines.rank_all(client).values()) == {"a-i-0", "b-i-0"}
    machines.list_peers(0)
    machines.a.wait_for("the peers file .* is read again")


def _router_pid(served: ServeProcess) -> int:
    """The process of a deployment's router."""
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
    for pid in children.read_text().split():
        if b"router_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("there is no router")


def test_another_cluster_key_is_refused(machines: TwoMachines):
    machines.list_peers(0)
    words = ("--instances", "0", "--port", "0", "--peers", str(machines.peers))
    with serve_on(machines.names[0], machines.place, "d", f"not {CLUSTER_KEY}", *words) as d:
        d.wait_for("instance b-i-0 refuses the key of this router")
        with Client(d.url, ADMIN, deadline_ms=5_000) as other:
            assert machines.fleet(other) == {"b-i-0": "down"}
            with pytest.raises(RefusalError) as refused:
                other.rank(USERS[0], WANTED)
            assert (refused.value.status, refused.value.code) == (503, "unavailable")
    for key in ({}, {"x-api-key": KEY}, {"x-api-key": CLUSTER_KEY}):
        asked = http.client.HTTPConnection(ADDRESSES[1], FIRST_PORT, timeout=LONG)
        asked.request("GET", f"/v1/users/{USERS[0]}", headers=key)
        assert asked.getresponse().status == 401
        asked.close()


def test_secrets_are_in_no_command_line(machines: TwoMachines):
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert CLUSTER_KEY.encode() not in process.read_bytes()
        except OSError:
            continue


def test_a_machine_that_cannot_be_reached_is_down_until_it_can(
    machines: TwoMachines, client: Client
):
    before = machines.rank_all(client)
    cable = ["ip", "-n", machines.names[1], "link", "set", machines.card]
    subprocess.run([*cable, "down"], check=True, timeout=LONG)
    wait_until(lambda: machines.fleet(client)["b-i-0"] == "down", LONG)
    assert set(machines.rank_all(client).values()) == {"a-i-0"}
    subprocess.run([*cable, "up"], check=True, timeout=LONG)
    wait_until(lambda: machines.fleet(client)["b-i-0"] == "ready", LONG)
    wait_until(lambda: machines.rank_all(client) == before, LONG)


def test_a_machine_that_ends_finishes_what_it_has(machines: TwoMachines, client: Client):
    with Load(machines) as load:
        load.go_on()
        machines.b.process.send_signal(signal.SIGTERM)
        assert machines.b.process.wait(LONG) == 0
        wait_until(lambda: machines.fleet(client)["b-i-0"] == "down", LONG)
        load.go_on()
    assert load.failures == []
    assert set(machines.rank_all(client).values()) == {"a-i-0"}
