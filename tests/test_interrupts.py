"""SIGTERM ends what is inside as Ctrl-C does, once, and leaves the process's own handling as it
was.
"""

import os
import signal
import threading

import pytest

from slipstream.interrupts import terminated_as_interrupted


def test_sigterm_is_an_interrupt_once_and_then_as_before():
    before, tidied = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # does not disturb the taking down
            tidied.append(True)
    assert tidied == [True] and signal.getsignal(signal.SIGTERM) == before


def test_another_thread_changes_nothing():
    seen = []

    def inside():
        with terminated_as_interrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join(10)
    assert seen == [signal.getsignal(signal.SIGTERM)]
