"""Threads and OpenMP's waiting follow what is free on the machine."""

import json
import math
import os
import subprocess
import sys

import pytest

from slipstream import machine
from slipstream.machine import (
    MachineLoad,
    busy_seconds,
    choose_threads,
    measure_load,
    read_quota,
    wait_passively_where_crowded,
)
from tests.support.tiny_runs import prepare_store, write_log

BEFORE = """cpu  1000 0 500 9000 100 0 10 5 0 0
cpu0 600 0 300 4000 50 0 10 5 70 0
cpu1 400 0 200 5000 50 0 0 0 0 0
intr 1 2 3
"""
QUIET, BUSY = MachineLoad(2, 2.0, 0.1, 0.1), MachineLoad(2, 2.0, 1.0, 1.0)
WITHOUT_TORCH = """
import sys
from slipstream.machine import MachineLoad, wait_passively_where_crowded as decide
assert "torch" not in sys.modules
found = {}
print(decide(found, MachineLoad(2, 2.0, 1.0, 0.0)), found)
print(decide({}, MachineLoad(2, 2.0, 0.3, 2.0)))
print(decide({"OMP_WAIT_POLICY": "active"}, MachineLoad(2, 2.0, 1.0, 1.0)))
print(decide({"GOMP_SPINCOUNT": "100"}, MachineLoad(2, 2.0, 1.0, 1.0)))
print(decide({"LOCAL_WORLD_SIZE": "2"}, MachineLoad(2, 2.0, 1.0, 1.0)))
"""


def test_the_time_of_our_cores_is_read_from_the_kernels_text():
    assert busy_seconds(BEFORE, {0, 1}, 100) == pytest.approx(15.15)
    assert busy_seconds(BEFORE, {1}, 100) == pytest.approx(6.0)  # idle and disk waits left out
    assert busy_seconds(BEFORE, {0}, 100) == pytest.approx(9.15)  # guests are in user already


def test_two_readings_give_what_others_use(tmp_path, monkeypatch):
    """One of two cores is busy for the whole sample."""
    stat = tmp_path / "stat"
    stat.write_text(BEFORE)
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine, "our_cores", lambda: {0, 1})
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    later = BEFORE.replace("cpu1 400", f"cpu1 {400 + 2 * os.sysconf('SC_CLK_TCK')}")
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: stat.write_text(later))
    load = measure_load()
    assert (load.cores, load.others) == (2, pytest.approx(1.0, abs=0.05))
    assert load.crowded


def test_a_machine_that_cannot_be_read_counts_as_quiet(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "STAT", tmp_path / "nothing")
    load = measure_load()
    assert load.others == 0 and not load.crowded


@pytest.mark.parametrize(
    ("load", "crowded"),
    [
        (QUIET, False),
        (BUSY, True),
        (MachineLoad(2, 2.0, 0.4, 0.4), False),
        (MachineLoad(2, 2.0, 0.6, 0.0), True),
        (MachineLoad(64, 64.0, 1.0, 1.0), True),
        (MachineLoad(64, 2.0, 40.0, 40.0), False),  # a quota of 2, and 24 cores are idle
        (MachineLoad(1, 0.5, 0.0, 0.0), False),
    ],
)
def test_a_machine_is_crowded_where_all_we_may_use_is_not_free(load, crowded):
    assert load.crowded is crowded


@pytest.mark.parametrize(
    ("load", "most", "count"),
    [
        (QUIET, 2, 2),
        (BUSY, 2, 1),
        (MachineLoad(2, 2.0, 2.0, 0.1), 2, 2),  # a burst that began just now
        (MachineLoad(2, 2.0, 0.0, 2.0), 2, 2),  # a job that has just ended
        (MachineLoad(2, 2.0, 2.0, 9.0), 2, 1),
        (MachineLoad(64, 64.0, 10.0, 10.0), 32, 32),
        (MachineLoad(64, 64.0, 60.0, 60.0), 32, 4),
        (MachineLoad(64, 1.5, 0.0, 0.0), 32, 2),
    ],
)
def test_threads_are_those_that_find_a_core(load, most, count):
    chosen, why = choose_threads(most, {}, load)
    assert chosen == count
    assert bool(why) == (count != most)


def test_threads_that_sleep_while_they_wait_share_the_cores_with_others():
    assert choose_threads(2, {"OMP_WAIT_POLICY": "passive"}, BUSY) == (2, "")
    assert choose_threads(2, {"OMP_WAIT_POLICY": "ACTIVE"}, BUSY)[0] == 1
    in_container = MachineLoad(64, 2.0, 60.0, 60.0)
    assert choose_threads(32, {"OMP_WAIT_POLICY": "passive"}, in_container)[0] == 2


def test_threads_the_user_chose_are_kept():
    assert choose_threads(2, {"OMP_NUM_THREADS": "2"}, BUSY) == (2, "")


def test_torchrun_s_one_thread_becomes_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(machine, "our_cores", lambda: set(range(8)))
    monkeypatch.setattr(machine, "read_quota", lambda: math.inf)
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    count, why = choose_threads(1, torchrun)
    assert count == 4 and "torchrun had set 1" in why
    assert choose_threads(3, torchrun | {"OMP_NUM_THREADS": "3"}) == (3, "")
    assert choose_threads(1, torchrun | {"LOCAL_WORLD_SIZE": "8"}) == (1, "")
    assert choose_threads(1, torchrun | {"LOCAL_WORLD_SIZE": "16"}) == (1, "")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_quota_of_a_control_group_is_read(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_quota(tmp_path) == quota


def test_the_wait_policy_is_decided_before_torch_is_loaded():
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.splitlines() == [
        "True {'OMP_WAIT_POLICY': 'passive'}",
        "False",
        "False",
        "False",
        "False",
    ]
    assert not wait_passively_where_crowded({}, BUSY)  # here torch is loaded


IN_PYTHON = """
import os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
from slipstream import machine
machine.measure_load = lambda: machine.MachineLoad(2, 2.0, 1.0, 1.0)
import slipstream as ss
assert "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ
ss.train
assert "torch" in sys.modules
print(os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.system
def test_in_python_the_first_use_of_train_decides():
    ended = subprocess.run(
        [sys.executable, "-c", IN_PYTHON], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "passive\n", ended.stderr


@pytest.mark.system
@pytest.mark.slow
def test_beside_busy_processes_a_training_waits_passively(tmp_path):
    write_log(tmp_path / "log.csv")
    store = prepare_store(tmp_path)
    words = ["train", "ml-1m-hstu", f"data={store}", "max_steps=1", "model.dim=8", "heads=1"]
    call = [sys.executable, "-m", "slipstream", *words, "--out", str(tmp_path / "run")]
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    spin = [sys.executable, "-c", "import time\nend = time.monotonic() + 200\n"]
    spin[-1] += "while time.monotonic() < end: pass"
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        ended = subprocess.run(call, env=chosen, capture_output=True, text=True, timeout=250)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert ended.returncode == 0, ended.stderr
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    assert note["machine"]["waiting"] == "passive"
    assert f"{note['machine']['threads']} of" not in ended.stderr
