"""The supervisor: restarts what dies, drains what leaves, reloads models, leaves no process behind.

Deadlines and waits are long: they only end a test that hangs.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.chaos.course import supervised
from slipstream.errors import SlipstreamError
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import HistoryMessage
from slipstream.serving.http.process import CANNOT_START
from slipstream.serving.supervisor import Supervisor, make_shelf
from tests.support.serving_fixtures import KEY, deployment, standin_plan, wait_until
from tests.support.serving_stand_in import standin_scores

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
        tokens = 8 * len(HISTORY.items)
        wait_until(lambda: outstanding_tokens(watcher.metrics()) == tokens, LONG)
        supervisor.stop()
        for thread in threads:
            thread.join(LONG)
    assert answers == [EXPECTED[0]] * 8


def outstanding_tokens(metrics: str) -> float:
    """The tokens of the requests that a router has sent and that are not answered yet."""
    lines = metrics.splitlines()
    name = "slipstream_router_outstanding_tokens{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_new_model_is_loaded_without_losing_a_request(tmp_path: Path):
    with (
        deployment(tmp_path) as supervisor,
        Visitors(supervisor.url) as visitors,
        connect(supervisor.url) as client,
    ):
        wait_until(lambda: len(visitors.answers) > 10, LONG)
        (tmp_path / "bundle" / "version").write_text("v2")
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


def test_no_process_outlives_a_killed_supervisor(tmp_path: Path):
    code = f"""
import pathlib, threading, time
from slipstream.serving.supervisor import Supervisor
from tests.support.serving_fixtures import standin_plan
supervisor = Supervisor(standin_plan(pathlib.Path({str(tmp_path)!r})), lambda sentence: None)
threading.Thread(target=supervisor.run, daemon=True).start()
while not supervisor.all_ready:
    time.sleep(0.05)
children = [*supervisor.instances, *supervisor.routers]
print(*(child.process.pid for child in children), flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait(LONG)
    assert len(pids) == 3
    wait_until(lambda: not any(_alive(pid) for pid in pids), LONG)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_shared_memory_of_a_killed_supervisor_is_removed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(LONG)
    mine = make_shelf()
    left = mine.with_name(f"slipstream-{os.getuid()}-{ended.pid}-left")
    left.mkdir()
    again = make_shelf()
    assert mine.exists() and again.exists() and not left.exists()
    mine.rmdir()
    again.rmdir()


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
