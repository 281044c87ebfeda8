"""What an idle server costs, how fast it ends, and that it starts with little shared memory.

Method. A small bundle (64 wide, 2 layers, 1,000 items) served by `slipstream serve` with its
defaults: one instance, one router. Memory of the instance is its proportional set size (PSS of
/proc/PID/smaps_rollup: pages shared with other processes are divided among them) two seconds after
it is ready. The end is timed from SIGTERM to the exit of the command, all of whose processes have
ended by then; the best of at most three servers counts, because a busy machine says nothing.
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from benchmarks.process_figures import children
from benchmarks.serving.bundle import random_bundle
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import HistoryMessage
from tests.support.serve_command import KEY, LONG, figure, served
from tests.support.serving_fixtures import wait_until

MODEL = {"kind": "hstu", "dim": 64, "blocks": 2, "heads": 2, "max_len": 512, "time_buckets": 32}
MB = 1_000_000
INSTANCE_MB, SUPERVISOR_MB, END_SECONDS = 350, 100, 1.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("footprint") / "bundle"
    random_bundle(place, MODEL, num_items=1_000, first_id=0)
    return place


def proportional_mb(pid: int) -> float:
    """The memory of a process, in which shared pages are divided among those that share them."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)
    assert found is not None
    return int(found[1]) * 1024 / MB


def test_an_idle_server_is_small_and_ends_at_once(bundle: Path):
    seconds: list[float] = []
    for _ in range(3):
        with served(bundle) as (_, process):
            time.sleep(2.0)
            found = children(process.pid)
            instance = proportional_mb(found["instance_process"][0])
            assert instance < INSTANCE_MB
            assert proportional_mb(process.pid) < SUPERVISOR_MB
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG) == 0
            seconds.append(time.monotonic() - began)
            assert not any(Path(f"/proc/{pid}").exists() for pids in found.values() for pid in pids)
        if seconds[-1] < END_SECONDS:
            return
    assert min(seconds) < END_SECONDS


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of its own needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_container_with_little_shared_memory_serves_with_a_smaller_tier(bundle: Path):
    """The default of container runtimes is 64 MiB; the default tier would be 512."""
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "
    with (
        served(
            bundle,
            "--no-trigger",  # every prefix is kept, though no user comes back
            before=("unshare", "--mount", "sh", "-c", small + '"$@"', "sh"),
        ) as (url, _),
        Client(url, KEY) as client,
    ):
        actions = {name: [0.0] * 400 for name in ("click", "like")}
        history = HistoryMessage(list(range(400)), list(range(400)), actions)

        def amount(name: str) -> float:
            return figure(client.metrics(), f"slipstream_instance_{name}")

        for number in range(250):  # each leaves a prefix of 400 KiB on the device tier
            client.rank(f"user {number}", [1, 2, 3], history)
        # Nobody asks now, so they are copied to the host tier, which has no room for all.
        wait_until(lambda: amount("host_allocated_bytes") > 48 * 2**20, LONG)
        for number in range(250, 270):  # the tier is full: older entries leave
            client.rank(f"user {number}", [1, 2, 3], history)
        wait_until(lambda: amount("demoted_total") >= 270, LONG)
        assert 48 * 2**20 < amount("host_allocated_bytes") < 64 * 2**20
