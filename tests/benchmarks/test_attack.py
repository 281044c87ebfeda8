"""The benchmark of an attacked server: windows are alike, claims come from what was seen."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.attack import bench
from benchmarks.attack.attackers import (
    Attack,
    AttackPlan,
    AttackReport,
    AttackTally,
    start_attackers,
)
from benchmarks.attack.honest import HonestWindow, arrivals
from benchmarks.chaos.load import Tally


def test_arrivals_are_the_same_in_every_window():
    moments = arrivals(30.0, 20.0)
    assert moments == arrivals(30.0, 20.0) == sorted(moments)
    assert 400 < len(moments) < 800 and moments[0] > 0 and moments[-1] < 20.0


def window(p99: float, wrong: int = 0, failures: int = 0) -> HonestWindow:
    return HonestWindow([p99 / 10] * 98 + [p99] * 2, ["?"] * failures, Tally(wrong=wrong))


def test_claims_are_those_of_the_pairs():
    tallies = {"junk": AttackTally(refused=8), "connections": AttackTally(refused=1, endured=1)}
    tallies["junk"].unfinished = 90  # not counted
    measured = bench.Measured(
        quiet=[window(0.1), window(0.2), window(0.1)],
        attacked=[window(0.1), window(0.4, wrong=2), window(0.13, failures=1)],
        reports=[AttackReport(tallies, 3.0)],
        before_bytes=100,
        attacked_bytes=[90, 120, 110],
        attack_seconds=10.0,
    )
    claims = bench.claims_of(measured)
    assert claims["p99_ratio_honest"] == pytest.approx(1.3)
    assert claims["refused"] == 0.9 and claims["memory_ratio"] == 1.2
    assert (claims["wrong_scores"], claims["failed_honest"]) == (2, 1)
    assert claims["attackers_share"] == pytest.approx(0.15)
    assert [row["variant"] for row in bench.rows_of(measured)][-2:] == ["connections", "router"]


def test_the_protocol_names_every_attack_and_its_address():
    text = (Path(bench.__file__).parents[1] / "protocols" / "attack.md").read_text()
    for attack in bench.ATTACKS:
        assert f"| `{attack.kind}` | {attack.source} |" in text


@pytest.fixture
def patient_server() -> Iterator[int]:
    """A server without any defence: it answers 200 to what it reads first, and waits."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        open_ones: list[socket.socket] = []

        def answer(connection: socket.socket) -> None:
            if connection.recv(65_536):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                open_ones.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        for connection in open_ones:
            connection.close()
        listening.shutdown(socket.SHUT_RDWR)


def test_what_no_server_refuses_is_told(patient_server: int):
    """The check can fail: a server without defence serves junk and endures connections."""
    attacks = [Attack("junk", "127.0.0.5", 3), Attack("connections", "127.0.0.2", 2)]
    with start_attackers(AttackPlan(patient_server, 1.5, attacks)) as attackers:
        report = attackers.report()
    assert (report.tallies["junk"].served, report.tallies["junk"].refused) == (3, 0)
    held = report.tallies["connections"]
    assert (held.unfinished, held.attempts) == (2, 0)
    assert report.processor_seconds > 0


@pytest.mark.slow
def test_a_pair_of_windows_runs_through_the_real_server(tmp_path: Path):
    result = bench.run(True, tmp_path / "attack.json")
    claims = result["claims"]
    assert claims["refused"] == 1.0
    assert (claims["wrong_scores"], claims["failed_honest"]) == (0, 0)
    assert {"p99_ratio_honest", "memory_ratio", "attackers_share"} <= set(claims)
    assert json.loads((tmp_path / "attack.json").read_text())["bench"] == "attack"
