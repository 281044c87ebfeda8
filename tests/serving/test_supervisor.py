"""The supervisor: restarts what dies, drains what leaves, reloads models, leaves no process behind.

Deadlines and waits are long: they only end a test that hangs.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.course import supervised
from slipstream.errors import SlipstreamError
from slipstream.serving.cluster_config import ClusterConfig
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import HistoryMessage
from slipstream.serving.http.process import CANNOT_START
from slipstream.serving.http.readiness import is_ready
from slipstream.serving.router.hashing import rendezvous_order, seed_of
from slipstream.serving.supervisor import Supervisor
from tests.support.serving_fixtures import KEY, deployment, standin_plan, wait_until
from tests.support.serving_stand_in import standin_scores, write_standin_bundle

pytestmark = pytest.mark.system
LONG = 60.0  # seconds
HISTORY = HistoryMessage(items=[5, 6, 7], timestamps=[10, 20, 30])
EXPECTED = standin_scores([5, 6, 7], [10, 20, 30], [1, 2, 3])


def connect(url: str) -> Client:
    return Client(url, KEY, deadline_ms=1_000 * LONG)


class Visitors:
    """Many users that are ranked again and again, in a thread; answers and failures are kept."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))

    def _run(self, url: str) -> None:
        with connect(url) as client:
            number = 0
            while not self._stop.is_set():
                number += 1
                try:
                    early = client.preinfer(f"user-{number % 50}", HISTORY)
                    late = client.rank(
                        f"user-{number % 50}", [1, 2, 3], HISTORY, ticket=early.ticket
                    )
                    assert late.scores["score"] == standin_scores(
                        [5, 6, 7], [10, 20, 30], [1, 2, 3], late.version
                    )
                    self.answers.append((late.instance, late.version))
                except SlipstreamError as error:
                    self.failures.append(str(error))

    def __enter__(self) -> "Visitors":
        self._thread.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._stop.set()
        self._thread.join(2 * LONG)


def pid(supervisor: Supervisor, number: int) -> int:
    process = supervisor.instances[number].process
    assert process is not None
    return process.pid


def test_a_killed_instance_costs_no_answer_and_comes_back(tmp_path: Path):
    with deployment(tmp_path) as supervisor, Visitors(supervisor.url) as visitors:
        wait_until(lambda: len(visitors.answers) > 20, LONG)
        old = pid(supervisor, 0)
        os.kill(old, signal.SIGKILL)
        wait_until(
            lambda: supervisor.instances[0].process is not None and pid(supervisor, 0) != old, LONG
        )
        seen = len(visitors.answers)
        wait_until(lambda: "i-0" in {instance for instance, _ in visitors.answers[seen:]}, LONG)
        assert visitors.failures == []


def test_a_drained_instance_loses_nothing_and_its_tickets_are_honoured_elsewhere(tmp_path: Path):
    with (
        deployment(tmp_path) as supervisor,
        Visitors(supervisor.url) as visitors,
        connect(supervisor.url) as client,
    ):
        # The router learns of an instance by its next probe: both must have answered.
        wait_until(lambda: {at for at, _ in visitors.answers} == {"i-0", "i-1"}, LONG)
        user = next(
            f"t{number}"
            for number in range(50)
            if client.preinfer(f"t{number}", HISTORY).instance == "i-0"
        )
        ticket = client.preinfer(user, HISTORY).ticket
        assert client.drain("i-0").draining == "i-0"
        late = client.rank(user, [1, 2, 3], HISTORY, ticket=ticket)
        assert (late.instance, late.hit, late.scores["score"]) == ("i-1", "inline", EXPECTED)
        seen = len(visitors.answers)
        wait_until(lambda: len(visitors.answers) > seen + 30, LONG)
        assert {instance for instance, _ in visitors.answers[seen + 5 :]} == {"i-1"}
        os.kill(pid(supervisor, 0), signal.SIGTERM)  # it ends, and a new process takes its place
        seen = len(visitors.answers)
        wait_until(lambda: "i-0" in {instance for instance, _ in visitors.answers[seen:]}, LONG)
        assert visitors.failures == []


def test_the_end_waits_for_every_request_under_way(tmp_path: Path):
    answers: list[float] = []
    slow = {"model": {"rank_ms": 3_000.0}, "drain_seconds": LONG}
    with deployment(tmp_path, **slow) as supervisor, connect(supervisor.url) as watcher:

        def rank(number: int) -> None:
            with connect(supervisor.url) as client:
                answers.append(client.rank(f"u{number}", [1], HISTORY).scores["score"][0])

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        behaviours = 8 * len(HISTORY.items)
        wait_until(lambda: outstanding_behaviours(watcher.metrics()) == behaviours, LONG)
        supervisor.stop()
        for thread in threads:
            thread.join(LONG)
    assert answers == [EXPECTED[0]] * 8


def outstanding_behaviours(metrics: str) -> float:
    """The behaviours of the requests that a router has sent and that are not answered yet."""
    lines = metrics.splitlines()
    name = "slipstream_router_outstanding_behaviours{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_new_model_is_loaded_without_losing_a_request(tmp_path: Path):
    with (
        deployment(tmp_path) as supervisor,
        Visitors(supervisor.url) as visitors,
        connect(supervisor.url) as client,
    ):
        wait_until(lambda: len(visitors.answers) > 10, LONG)
        write_standin_bundle(tmp_path / "bundle", "v2")
        with pytest.raises(SlipstreamError, match="holds version v2, not v3"):
            client.reload("v3")
        changed = client.reload("v2")
        assert (changed.before, changed.after) == (
            {"i-0": "v1", "i-1": "v1"},
            {"i-0": "v2", "i-1": "v2"},
        )
        seen = len(visitors.answers)
        wait_until(lambda: len(visitors.answers) > seen + 20, LONG)
        assert {version for _, version in visitors.answers[seen + 5 :]} == {"v2"}
        assert visitors.failures == []


def test_a_crash_never_opens_a_newer_bundle_and_a_failed_reload_changes_nothing(tmp_path: Path):
    lines: list[str] = []
    plan = standin_plan(tmp_path)
    with supervised(plan, lines.append) as supervisor, connect(supervisor.url) as client:
        write_standin_bundle(tmp_path / "bundle", "v2")
        for number in (0, 1):
            old = pid(supervisor, number)
            os.kill(old, signal.SIGKILL)
            wait_until(
                lambda old=old, n=number: pid_or_none(supervisor, n) not in (old, None), LONG
            )
        assert _versions(client) == {"v1"}
        write_standin_bundle(tmp_path / "bundle", "bad1")
        with pytest.raises(SlipstreamError, match="ranks wrongly"):
            client.reload()
        assert _versions(client) == {"v1"}
        write_standin_bundle(tmp_path / "bundle", "v3")
        client.reload(share=0.3)
        shown = client.versions().instances
        assert {(each.stable, each.candidate) for each in shown.values()} == {("v1", "v3")}
        before = {user: client.rank(user, [1], HISTORY).version for user in USERS}
        assert set(before.values()) == {"v1", "v3"}
        told = _returns(lines)  # one after the first crash
        os.kill(pid(supervisor, 0), signal.SIGKILL)  # the candidate and its users outlive a crash
        wait_until(lambda: _returns(lines) > told, LONG)
        assert {user: client.rank(user, [1], HISTORY).version for user in USERS} == before
        assert set(client.traffic(share=1.0).after.values()) == {"v3"}
        assert _versions(client) == {"v3"}
        assert set(client.rollback().after.values()) == {"v1"}
        assert _versions(client) == {"v1"}
    assert "serving version v3 instead of v1" in lines


USERS = [f"user {number}" for number in range(30)]


def _returns(lines: list[str]) -> int:
    """How often the first instance came back."""
    return sum(line.startswith("i-0 is ready again") for line in lines)


def _versions(client: Client) -> set[str]:
    return {client.rank(user, [1], HISTORY).version for user in USERS}


def pid_or_none(supervisor: Supervisor, number: int) -> int | None:
    child = supervisor.instances[number]
    ready = child.process is not None and is_ready(child.url)
    return child.process.pid if ready else None


def test_connections_wait_while_a_router_restarts(tmp_path: Path):
    with deployment(tmp_path) as supervisor:
        router = supervisor.routers[0].process
        assert router is not None
        os.kill(router.pid, signal.SIGKILL)
        with connect(supervisor.url) as client:
            assert client.rank("ann", [1, 2, 3], HISTORY).scores["score"] == EXPECTED


def test_an_instance_that_cannot_start_is_given_up(tmp_path: Path):
    plan = standin_plan(tmp_path, instance_command=(sys.executable, "-c", "raise SystemExit(3)"))
    with (
        pytest.raises(
            SlipstreamError, match=r"i-\d ended 5 times right after its start \(code 3\)"
        ),
        supervised(plan, print),
    ):
        pass


def test_a_taken_port_is_explained(tmp_path: Path):
    with (
        deployment(tmp_path) as supervisor,
        pytest.raises(SlipstreamError, match="choose another --port"),
    ):
        Supervisor(standin_plan(tmp_path, port=supervisor.port), print)


@contextlib.contextmanager
def _supervisor_apart(
    tmp_path: Path, changes: str = ""
) -> Iterator[tuple["subprocess.Popen[bytes]", list[int]]]:
    """A supervisor in a process of its own, and the processes of its children."""
    code = f"""
import pathlib, threading, time
from slipstream.serving.supervisor import Supervisor
from tests.support.serving_fixtures import standin_plan
plan = standin_plan(pathlib.Path({str(tmp_path)!r}), {changes})
supervisor = Supervisor(plan, lambda sentence: None)
threading.Thread(target=supervisor.run, daemon=True).start()
while not supervisor.all_ready:
    time.sleep(0.05)
children = [*supervisor.instances, *supervisor.routers]
print(*(child.process.pid for child in children), flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        with process.stdout:
            pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        yield process, pids
    finally:
        process.kill()
        process.wait(LONG)


def test_no_process_outlives_a_killed_supervisor(tmp_path: Path):
    with _supervisor_apart(tmp_path) as (_, pids):
        pass
    wait_until(lambda: not any(_alive(pid) for pid in pids), LONG)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_instance_that_cannot_start_is_not_started_again(tmp_path: Path):
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'a').write('x'); raise SystemExit({CANNOT_START})"
    supervisor = Supervisor(
        standin_plan(tmp_path, instances=1, instance_command=(sys.executable, "-c", code)),
        lambda _sentence: None,
    )
    with pytest.raises(SlipstreamError, match="i-0 cannot start; the error above says why"):
        supervisor.run()
    assert started.read_text() == "x"


@pytest.mark.parametrize("way", ["instance stopped", "instance stuck", "router stopped"])
def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path, way: str):
    lines: list[str] = []
    plan = standin_plan(tmp_path, hang_seconds=1.0)
    with supervised(plan, lines.append) as supervisor, connect(supervisor.url) as client:
        child = supervisor.routers[0] if way == "router stopped" else supervisor.instances[0]
        old = child.process
        assert old is not None
        if way == "instance stuck":  # its event loop goes on, and says that it does not compute
            users = (f"stuck {number}" for number in range(100))
            next(user for user in users if client.rank(user, [1], HISTORY).instance == "i-0")
        else:
            os.kill(old.pid, signal.SIGSTOP)
        wait_until(lambda: f"{child.name} is ready again" in " ".join(lines), LONG)
        assert child.process is not old and child.restarts == 1
        hangs = [line for line in lines if "hangs: no heartbeat for" in line]
        assert len(hangs) == 1 and hangs[0].startswith(child.name)
        assert client.rank("ann", [1, 2, 3], HISTORY).scores["score"] == EXPECTED
        if child in supervisor.instances:
            wait_until(lambda: is_ready(child.url), LONG)
    assert not [line for line in lines if "did not finish in time" in line]


def test_after_a_pause_of_the_whole_container_nobody_is_killed(tmp_path: Path):
    """Every heartbeat is old then, and yet nobody hangs."""
    with _supervisor_apart(tmp_path, "hang_seconds=1.0") as (process, pids):
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # longer than a process may be silent
        for pid in (*pids, process.pid):
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)  # the supervisor looks many times
        assert all(_alive(pid) for pid in pids)


def test_an_instance_that_hangs_is_ejected_though_deadlines_are_short(tmp_path: Path):
    with (
        deployment(tmp_path, hang_seconds=LONG) as supervisor,
        Client(supervisor.url, KEY, deadline_ms=250) as client,
    ):

        def served_by(user: str) -> str:
            try:
                return client.rank(user, [1], HISTORY).instance
            except SlipstreamError:
                return "none"

        names = ["i-0", "i-1"]
        orders = {f"u{n}": rendezvous_order(f"u{n}", names, seed_of) for n in range(20)}
        places = {order[0]: user for user, order in orders.items()}
        wait_until(lambda: [served_by(places[name]) for name in names] == names, LONG)
        hung = pid(supervisor, 0)
        os.kill(hung, signal.SIGSTOP)
        try:
            for _ in range(20):
                served_by(places["i-1"])
                if served_by(places["i-0"]) == "i-1":
                    break
            with connect(supervisor.url) as watcher:
                metrics = watcher.metrics().splitlines()
            assert 'slipstream_router_ejected_total{reason="failing"} 1.0' in metrics
        finally:
            os.kill(hung, signal.SIGCONT)


def test_instances_listen_on_private_sockets_and_no_setting_is_in_a_command_line(tmp_path: Path):
    with deployment(tmp_path, spare=False) as supervisor:
        place = Path(supervisor.instances[0].url.removeprefix("unix:"))
        assert place.is_socket() and place.stat().st_mode & 0o077 == 0
        assert place.parent.stat().st_mode & 0o077 == 0
        ports = _listening_ports([pid(supervisor, number) for number in (0, 1)])
        assert ports == set(), "an instance's port could be taken after a kill"
        for child in (*supervisor.instances, *supervisor.routers):
            assert child.process is not None
            words = Path(f"/proc/{child.process.pid}/cmdline").read_bytes().split(b"\0")
            assert b"-" in words and not any(b"{" in word or b"sqlite:" in word for word in words)


def _listening_ports(pids: list[int]) -> set[int]:
    """Return the TCP ports on which these processes listen."""
    held = {
        os.readlink(entry)
        for pid in pids
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(entry).startswith("socket:")
    }
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = (line.split() for line in lines if line.split()[3] == "0A")
    return {int(f[1].split(":")[1], 16) for f in listening if f"socket:[{f[9]}]" in held}


def test_tickets_outlive_the_supervisor_and_their_key_is_in_no_command_line(tmp_path: Path):
    tickets, state = [], tmp_path / "state"
    for _ in range(2):
        with (
            deployment(tmp_path, state=state, spare=False) as supervisor,
            connect(supervisor.url) as client,
        ):
            tickets.append(client.preinfer("ann", HISTORY).ticket)
            for ticket in (*tickets, "a forged one"):
                late = client.rank("ann", [1, 2, 3], HISTORY, ticket=ticket)
                assert late.scores["score"] == EXPECTED
            counted = 'slipstream_router_events_total{event="ticket_invalid"} 1.0'
            assert counted in client.metrics().splitlines()
            key = (state / "ticket.key").read_bytes().strip()
            for child in (*supervisor.instances, *supervisor.routers):
                assert child.process is not None
                assert key not in Path(f"/proc/{child.process.pid}/cmdline").read_bytes()


def test_instances_that_other_machines_reach_want_the_key_and_linger_at_the_end(tmp_path: Path):
    cluster = ClusterConfig("a key that all machines of a cluster share", "b", ("127.0.0.1", 0))

    def ask(key: str) -> tuple[int, dict[str, object]]:
        asked = http.client.HTTPConnection(address, timeout=LONG)
        asked.request("GET", "/v1/status", headers={"x-api-key": key})
        with contextlib.closing(asked), asked.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    with deployment(tmp_path, cluster=cluster, routers=0, linger=LONG) as supervisor:
        assert [child.name for child in supervisor.instances] == ["b-i-0", "b-i-1"]
        address = supervisor.addresses[1].removeprefix("http://")
        assert [ask(key)[0] for key in ("", cluster.key)] == [401, 401]
        assert ask(cluster.instance_key())[1]["draining"] is False
        supervisor.stop()
        wait_until(lambda: ask(cluster.instance_key())[1]["draining"] is True, LONG)
        for _ in range(200):  # it accepts connections until routers of other machines know
            assert ask(cluster.instance_key())[0] == 200
        for child in supervisor.instances:
            assert child.process is not None
            child.process.kill()


def test_a_port_for_other_machines_that_is_taken_is_one_sentence(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = ClusterConfig("a key that all machines share", "b", ("127.0.0.1", port))
        plan = standin_plan(tmp_path, cluster=cluster, instances=1)
        with pytest.raises(SlipstreamError, match="choose another --listen-instances"):
            Supervisor(plan, lambda _sentence: None)
