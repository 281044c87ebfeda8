"""SIGTERM handled as Ctrl-C, so that `finally` blocks run before the process ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM inside the block; only the main thread can do this."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # a second one must not interrupt the cleaning up
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
