"""Ranks that tests start: answers come in order, and a failure names who failed first."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks_fixtures import run_ranks

HERE = __name__


def add(rank, world, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return [rank, int(total)]


def fail_on_one(rank, world, how):
    """Rank 1 ends while its peers wait for it in a collective."""
    if rank == 1:
        if how == "raises":
            raise ValueError("the culprit's own words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on_one(rank, world):
    while rank == 1:
        time.sleep(0.1)
    dist.all_reduce(torch.ones(1))


def test_answers_come_in_rank_order(tmp_path):
    assert run_ranks(3, f"{HERE}:add", tmp_path, offset=10) == [[0, 33], [1, 33], [2, 33]]


@pytest.mark.parametrize(
    ("how", "words"), [("raises", "the culprit's own words"), ("is killed", "ended by signal 9")]
)
def test_the_rank_that_failed_first_is_named_with_its_own_error(tmp_path, how, words):
    with pytest.raises(AssertionError) as failed:
        run_ranks(3, f"{HERE}:fail_on_one", tmp_path, how=how)
    # Before it stands what the ranks printed, gloo's own log lines of closed connections too.
    _, said, report = str(failed.value).partition("rank 1 failed first")
    first, _, rest = report.partition("\nthen rank ")
    assert said and words in first
    assert "Connection" not in first and "culprit" not in rest


def test_a_rank_that_hangs_tells_where_it_is(tmp_path):
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, f"{HERE}:hang_on_one", tmp_path, seconds=3.0)
    report = str(failed.value)
    assert "rank 0 failed first" in report  # it gave up waiting
    assert "in hang_on_one" in report.partition("rank 1 was still running:")[2]
