"""The benchmark of a large catalogue measures processes with their children, on the log it says."""

import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from benchmarks import large_catalogue
from benchmarks.large_catalogue import Usage, sample_tree, watched

CHILD = "import time; held = bytearray(b'x' * 60_000_000); time.sleep(30)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_the_memory_of_children_counts():
    process = subprocess.Popen([sys.executable, "-c", PARENT], text=True, start_new_session=True)
    usage = Usage()
    try:
        with watched(process, usage):
            end = time.monotonic() + 20
            while usage.above_start < 60_000_000 and time.monotonic() < end:
                time.sleep(0.05)
    finally:
        subprocess.run(["kill", "--", f"-{process.pid}"], check=False)
        process.wait()
    assert 60_000_000 < usage.above_start < 200_000_000 and usage.mapped > 0
    assert sample_tree(process.pid) == dict.fromkeys(large_catalogue.KINDS, 0)


def test_every_item_of_the_log_occurs_once(tmp_path):
    large_catalogue.write_log(tmp_path / "log.parquet", 1_000)
    log = pq.read_table(tmp_path / "log.parquet").to_pydict()
    assert sorted(log["item_id"]) == list(range(1_000)) and set(log["user_id"]) == set(range(10))


@pytest.mark.slow
def test_the_quick_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_BENCH_ITEMS", "60000")
    claims = large_catalogue.run(quick=True)["claims"]
    assert claims.pop("topk_equal") == 1 and len(claims) == 5
    assert all(0 < value < 2e9 for value in claims.values())
