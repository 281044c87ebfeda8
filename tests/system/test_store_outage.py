"""A history store that is locked, full, immutable, hung or gone costs a clear 503, never a 500.

What was answered with an error is not stored later, requests that send their history are served,
and everything works again when the store does. Real stores, a real router, stand-ins for models.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest
import redis

from benchmarks.chaos.outages import full_disk, small_disk
from slipstream.serving.http.client import Client, RefusalError
from slipstream.serving.http.messages import HistoryMessage
from slipstream.serving.supervisor import Supervisor
from tests.support.redis_server import free_port, redis_server
from tests.support.serving_fixtures import KEY, deployment, wait_until
from tests.support.serving_stand_in import standin_scores

HISTORY = HistoryMessage(items=[5, 6, 7], timestamps=[10, 20, 30])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and immutable files need root")


def connect(supervisor: Supervisor) -> Client:
    return Client(supervisor.url, KEY, deadline_ms=2_000)


def refuse(client: Client, *, reads: bool = True) -> None:
    """Whatever needs the store is answered 503; what sends its history is served."""
    calls = [lambda: client.events("ann", [66], [66])]
    if reads:
        calls += [lambda: client.rank("ann", [1]), lambda: client.user("ann")]
    for call in calls:
        with pytest.raises(RefusalError) as refused:
            call()
        assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
    scores = client.rank("ann", [1, 2], HISTORY).scores["score"]
    assert scores == standin_scores([5, 6, 7], [10, 20, 30], [1, 2])


def stored(client: Client) -> list[object]:
    return list(client.user("ann").recent.items)


def test_a_locked_file_is_503_and_what_was_refused_is_not_stored_later(tmp_path: Path):
    with deployment(tmp_path) as supervisor, connect(supervisor) as client:
        client.events("ann", [1], [1])
        other = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        refuse(client, reads=False)
        assert stored(client) == [1], "reads do not wait for a writer"
        other.execute("ROLLBACK")
        other.close()
        assert client.events("ann", [2], [70]).behaviours == 2
        assert stored(client) == [1, 2]


@as_root
def test_a_full_disk_and_an_immutable_file_are_503_and_work_again(tmp_path: Path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        settings = {"history": f"sqlite:{disk / 'history.db'}"}
        with deployment(tmp_path, **settings) as supervisor, connect(supervisor) as client:
            client.events("ann", [1], [1])
            many = [2] * 1_000
            with full_disk(disk):
                with pytest.raises(RefusalError) as refused:
                    for _ in range(100):  # until the write-ahead log has no room left
                        client.events("bob", many, many)
                assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
                assert stored(client) == [1]
            assert client.events("ann", [2], [70]).behaviours == 2
    with deployment(tmp_path) as supervisor, connect(supervisor) as client:
        client.events("ann", [1], [1])
        files = [str(path) for path in tmp_path.glob("history.db*")]
        subprocess.run(["chattr", "+i", *files], check=True)
        try:
            os.kill(supervisor.instances[0].process.pid, signal.SIGKILL)
            os.kill(supervisor.instances[1].process.pid, signal.SIGKILL)
            wait_until(lambda: len(_served_by(client)) == 2, 60)
            with pytest.raises(RefusalError) as refused:
                client.events("ann", [66], [66])
            assert refused.value.status == 503
        finally:
            subprocess.run(["chattr", "-i", *files], check=True)
        assert client.events("ann", [2], [70]).behaviours == 2
        assert stored(client) == [1, 2]


def _served_by(client: Client) -> set[str]:
    """The instances that answer requests which send their history."""
    found = set()
    for number in range(20):
        with contextlib.suppress(RefusalError):
            found.add(client.rank(f"user {number}", [1], HISTORY).instance)
    return found


def test_instances_start_without_redis_and_find_it_when_it_comes_hung_or_not(tmp_path: Path):
    port = free_port()
    settings = {"history": f"redis://127.0.0.1:{port}/0"}
    with deployment(tmp_path, **settings) as supervisor, connect(supervisor) as client:
        refuse(client)
        with redis_server(tmp_path, port):
            assert client.events("ann", [1], [1]).behaviours == 1
            pid = redis.Redis(port=port).info("server")["process_id"]
            os.kill(pid, signal.SIGSTOP)
            try:
                refuse(client)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert client.events("ann", [2], [70]).behaviours == 2
            assert stored(client) == [1, 2]
        refuse(client)
