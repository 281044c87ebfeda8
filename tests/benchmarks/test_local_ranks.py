"""Rank 0's answer comes back; a failing or hanging rank ends all of them."""

import os
from pathlib import Path

import pytest

from benchmarks.local_ranks import run_ranks

PROGRAM = """
import json, os, sys, time
rank, folder = int(sys.argv[1]), sys.argv[2]
with open(os.path.join(folder, str(rank)), "w") as file:
    file.write(str(os.getpid()))
what = os.environ["WHAT"]
print("chatter " * 100_000)
if what == "fail" and rank == 1:
    sys.exit("the reason")
if what != "answer":
    time.sleep(30)
    open(os.path.join(folder, "slept"), "w").close()
print(json.dumps({"place": os.environ["PLACE"]}))
"""


def ask(folder: Path, what: str, seconds: float = 200.0) -> dict[str, str]:
    (folder / "answering_rank.py").write_text(PROGRAM)
    place = {"PYTHONPATH": str(folder), "WHAT": what}
    return run_ranks(
        "answering_rank",
        [str(folder)],
        world=2,
        seconds_allowed=seconds,
        environment=lambda rank: place | {"PLACE": str(rank)},
    )


def alive(folder: Path) -> list[int]:
    found = []
    for rank in range(2):
        pid = int((folder / str(rank)).read_text()) if (folder / str(rank)).exists() else 0
        if pid and os.path.exists(f"/proc/{pid}"):
            found.append(pid)
    return found


def test_rank_zero_answers_however_much_was_said_before(tmp_path: Path) -> None:
    assert ask(tmp_path, "answer") == {"place": "0"}
    assert alive(tmp_path) == []


def test_the_first_failure_ends_all_and_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 1 of answering_rank failed with exit code 1: the reason"
    ):
        ask(tmp_path, "fail")
    assert alive(tmp_path) == []
    assert not (tmp_path / "slept").exists()  # rank 0 was ended, not waited for


def test_a_hang_ends_when_the_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="did not end within 2 s"):
        ask(tmp_path, "hang", seconds=2.0)
    assert alive(tmp_path) == []
