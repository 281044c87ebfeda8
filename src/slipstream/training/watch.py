"""Knows when a rank is gone, and which one: every rank shows a sign of life in the job's store, and
looks for its neighbour's.

A rank that dies breaks the connections of the others, and their next collective fails at once,
without a name; `who_is_lost` then finds the rank whose signs have stopped, or that said why it
ends. A rank that only stops answering breaks nothing: after `SILENCE` seconds without a sign its
neighbour tells everybody, and processes that are still stuck in a collective are ended.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

BEAT = 1.0  # seconds between signs of life
NAMING = 4.0  # seconds without a sign that are enough once a collective has failed
SILENCE = 30.0  # seconds without a sign that are enough by themselves
GRACE = 5.0  # seconds a process has to leave by itself once somebody is known to be lost


class Watch:
    """This rank's sign of life, and its look at the others'."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        silence: float = SILENCE,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.world, self.silence = rank, world, silence
        self._store = dist.PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=10))
        self._end = end or end_process
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._set(f"who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._set(f"beat/{rank}", "0")
        self._thread = threading.Thread(target=self._work, name="slipstream-watch", daemon=True)
        self._thread.start()

    def report(self, reason: str) -> None:
        """Tell the others why this rank ends; what one rank knows, all can say."""
        with contextlib.suppress(RuntimeError):
            self._set(f"failed/{self.rank}", reason[:2000])

    def who_is_lost(self, patience: float = 3 * NAMING) -> str | None:
        """After a failed collective: a sentence about the rank that is gone, or None when everybody
        shows signs of life.
        """
        seen: dict[int, tuple[str | None, float]] = {}
        started = time.monotonic()
        while time.monotonic() - started < patience:
            for other in (rank for rank in range(self.world) if rank != self.rank):
                try:
                    if (reason := self._get(f"failed/{other}")) is not None:
                        return f"rank {other} failed: {reason}"
                    beat = self._get(f"beat/{other}")
                    left = self._get(f"left/{other}") is not None
                except RuntimeError:
                    return (
                        "the store of the job is gone, and with it the process that started "
                        "the ranks (or rank 0)"
                    )
                if other not in seen or seen[other][0] != beat or left:
                    seen[other] = (beat, time.monotonic())
                elif time.monotonic() - seen[other][1] > NAMING:
                    return self._lost_sentence(other)
            time.sleep(0.2)
        return None

    def close(self) -> None:
        """This rank leaves in good order (or has said why not)."""
        self._closed.set()
        self._thread.join(timeout=15)
        with contextlib.suppress(RuntimeError):
            self._set(f"left/{self.rank}", "")

    def _work(self) -> None:
        neighbour, seen, count, failures, lost_since = (
            (self.rank + 1) % self.world,
            ("", time.monotonic()),
            0,
            0,
            0.0,
        )
        while not self._closed.wait(BEAT):
            count += 1
            now, lost = time.monotonic(), None
            try:
                self._set(f"beat/{self.rank}", str(count))
                beat = self._get(f"beat/{neighbour}") or ""
                if beat != seen[0] or self._get(f"left/{neighbour}") is not None:
                    seen = (beat, now)
                elif now - seen[1] > self.silence and self._get("lost") is None:
                    self._set("lost", self._lost_sentence(neighbour))
                lost, failures = self._get("lost"), 0
            except RuntimeError:
                failures += 1
                lost = (
                    "the store of the job is gone, and with it the process that started the ranks"
                    if failures >= 3
                    else None
                )
            if lost is not None:
                lost_since = lost_since or now
                if now - lost_since > GRACE and not self._closed.is_set():
                    self._end(lost)
                    return

    def _lost_sentence(self, rank: int) -> str:
        who = self._get(f"who/{rank}") or "never seen"
        return f"rank {rank} ({who}) is dead or does not answer"

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def _get(self, key: str) -> str | None:
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None


def end_process(sentence: str) -> None:
    """The last resort: the main thread is stuck in a collective that will never end."""
    print(
        f"error: {sentence}; this job ends, run the same command again to go on from the last "
        "checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
