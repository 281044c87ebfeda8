"""Pauses of the machine are seen, and only they."""

import os
import signal
import time

import pytest

from benchmarks.machine_pauses import PauseWitness
from tests.support.serving_fixtures import wait_until

needs_priority = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may set a real-time priority"
)


@needs_priority
def test_a_witness_that_does_not_run_for_a_while_tells_for_how_long():
    with PauseWitness() as witness:
        assert witness.watching
        begin = time.monotonic()
        os.kill(witness.pid, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(witness.pid, signal.SIGCONT)
        wait_until(lambda: max(witness.since(begin), default=0.0) > 0.3, 10.0)
        assert witness.since(time.monotonic() + 60.0) == []
    assert not witness.watching


def test_a_user_without_the_right_sees_no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.machine_pauses._WITNESS", "raise PermissionError({parent})")
    with PauseWitness() as witness:
        assert not witness.watching and witness.since(0.0) == []
