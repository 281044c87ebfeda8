"""SIGTERM as Ctrl-C: what was built is taken down again before the process ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, as Ctrl-C does. Only a main thread can be told;
    elsewhere nothing changes.
    """

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the taking down
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
