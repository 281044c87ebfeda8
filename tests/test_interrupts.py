"""SIGTERM ends a block as Ctrl-C does, once, and the process's own handler comes back."""

import os
import signal
import threading

import pytest

from slipstream.interrupts import terminated_as_interrupted


def test_sigterm_interrupts_once_and_the_old_handler_comes_back():
    before, tidied = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt the cleaning up
            tidied.append(True)
    assert tidied == [True] and signal.getsignal(signal.SIGTERM) == before


def test_another_thread_changes_nothing():
    seen = []

    def inside():
        with terminated_as_interrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
