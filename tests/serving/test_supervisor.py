"""The supervisor: starts again what dies, drains what leaves, changes models, leaves no process
behind.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.chaos.course import supervised
from slipstream.errors import SlipstreamError
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import HistoryMessage
from slipstream.serving.supervisor import Supervisor
from tests.support.serving_fixtures import KEY, deployment, standin_plan, wait_until
from tests.support.serving_stand_in import standin_scores

HISTORY = HistoryMessage(items=[5, 6, 7], timestamps=[10, 20, 30])
EXPECTED = standin_scores([5, 6, 7], [10, 20, 30], [1, 2, 3])


class Asking:
    """A client that ranks for many users, again and again, in a thread; its failures are kept."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))

    def _run(self, url: str) -> None:
        with Client(url, KEY) as client:
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

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._stop.set()
        self._thread.join(20)


def pid(supervisor: Supervisor, number: int) -> int:
    process = supervisor.instances[number].process
    assert process is not None
    return process.pid


def test_a_killed_instance_costs_no_answer_and_comes_back(tmp_path: Path):
    with deployment(tmp_path) as supervisor, Asking(supervisor.url) as asking:
        wait_until(lambda: len(asking.answers) > 20, 20)
        old = pid(supervisor, 0)
        os.kill(old, signal.SIGKILL)
        wait_until(
            lambda: supervisor.instances[0].process is not None and pid(supervisor, 0) != old, 10
        )
        seen = len(asking.answers)
        wait_until(lambda: "i-0" in {instance for instance, _ in asking.answers[seen:]}, 10)
        assert asking.failures == []


def test_a_drained_instance_loses_nothing_and_its_tickets_are_honoured_elsewhere(tmp_path: Path):
    with (
        deployment(tmp_path) as supervisor,
        Asking(supervisor.url) as asking,
        Client(supervisor.url, KEY) as client,
    ):
        mine = next(
            early
            for number in range(50)
            if (early := client.preinfer(f"t{number}", HISTORY)).instance == "i-0"
        )
        user = next(
            f"t{number}"
            for number in range(50)
            if client.preinfer(f"t{number}", HISTORY).instance == "i-0"
        )
        ticket = client.preinfer(user, HISTORY).ticket
        assert mine.instance == "i-0"
        assert client.drain("i-0").draining == "i-0"
        late = client.rank(user, [1, 2, 3], HISTORY, ticket=ticket)
        assert (late.instance, late.hit, late.scores["score"]) == ("i-1", "inline", EXPECTED)
        seen = len(asking.answers)
        wait_until(lambda: len(asking.answers) > seen + 30, 20)
        assert {instance for instance, _ in asking.answers[seen + 5 :]} == {"i-1"}
        os.kill(
            pid(supervisor, 0), signal.SIGTERM
        )  # the drained one leaves; a fresh one takes its place
        seen = len(asking.answers)
        wait_until(lambda: "i-0" in {instance for instance, _ in asking.answers[seen:]}, 15)
        assert asking.failures == []


def test_the_end_waits_for_every_request_under_way(tmp_path: Path):
    answers: list[float] = []
    with deployment(tmp_path, model={"rank_ms": 700.0}) as supervisor:

        def ask(number: int) -> None:
            with Client(supervisor.url, KEY) as client:
                answers.append(client.rank(f"u{number}", [1], HISTORY).scores["score"][0])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        supervisor.stop()
        for thread in threads:
            thread.join(10)
    assert answers == [EXPECTED[0]] * 8


def test_a_new_model_is_taken_without_losing_a_request(tmp_path: Path):
    with (
        deployment(tmp_path) as supervisor,
        Asking(supervisor.url) as asking,
        Client(supervisor.url, KEY) as client,
    ):
        wait_until(lambda: len(asking.answers) > 10, 20)
        (tmp_path / "bundle" / "version").write_text("v2")
        with pytest.raises(SlipstreamError, match="holds version v2, not v3"):
            client.reload("v3")
        changed = client.reload("v2")
        assert (changed.before, changed.after) == (
            {"i-0": "v1", "i-1": "v1"},
            {"i-0": "v2", "i-1": "v2"},
        )
        seen = len(asking.answers)
        wait_until(lambda: len(asking.answers) > seen + 20, 20)
        assert {version for _, version in asking.answers[seen + 5 :]} == {"v2"}
        assert asking.failures == []


def test_while_a_router_restarts_connections_wait(tmp_path: Path):
    with deployment(tmp_path) as supervisor:
        router = supervisor.routers[0].process
        assert router is not None
        os.kill(router.pid, signal.SIGKILL)
        began = time.monotonic()
        with Client(supervisor.url, KEY) as client:
            assert client.rank("ann", [1, 2, 3], HISTORY).scores["score"] == EXPECTED
        assert time.monotonic() - began < 5


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


def test_nobody_outlives_a_killed_supervisor(tmp_path: Path):
    code = (
        "import sys, pathlib; from serving_fixtures import standin_plan; from "
        "slipstream.serving.supervisor import Supervisor\n"
        f"s = Supervisor(standin_plan(pathlib.Path({str(tmp_path)!r})), lambda t: None)\n"
        "import threading; threading.Thread(target=s.run, daemon=True).start()\n"
        "import time\n"
        "while not s.all_ready: time.sleep(0.05)\n"
        "print(*(c.process.pid for c in [*s.instances, *s.routers]), flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"]}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait(10)
    assert len(pids) == 3
    wait_until(lambda: not any(_alive(pid) for pid in pids), 15)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
