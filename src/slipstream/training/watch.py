"""Knows when a rank is gone, and which one: every rank shows a sign of life in the job's store.

A rank that dies breaks the connections of the others, and their next collective fails at once,
without a name. `who_is_lost` then finds out which rank caused it, in this order:

    reported an error of its own      -> "rank 2 failed: the disk is full"
    shows no sign of life any more    -> "rank 2 (process 41 on host) is dead or does not answer"
    lost its connections first        -> named only when no rank is found by the first two

so that a rank whose connections broke because of another one is not blamed for it. A rank that only
stops answering breaks nothing: after `SILENCE` seconds without a sign its neighbour marks it as
lost, and processes that are still stuck in a collective are ended. Touch this when a
failure of ranks is blamed on no rank or on the wrong one.
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

from slipstream.errors import SlipstreamError

BEAT = 1.0  # seconds between signs of life
# The limits below are the point of this module. A busy machine delays signs of life by seconds.
NAMING = 10.0  # seconds without a sign that are enough once a collective has failed
SILENCE = 20.0  # seconds without a sign that are enough by themselves; torchrun kills after 30
GRACE = 5.0  # seconds a process has to leave by itself once a rank is known to be lost

# What errors of collectives contain: another rank is gone, this one did not fail.
_TRANSPORT = ("gloo", "nccl", "hccl", "connection", "socket", "broken pipe", "timed out", "timeout")
_STORE_IS_GONE = "the store of the job is gone, and with it the process that started the ranks"


class Watch:
    """This rank's sign of life, and its view of the others'."""

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

    def report(self, error: BaseException) -> None:
        """Write down why this rank ends, so that the other ranks can name the reason."""
        kind = "disconnected" if is_connection_failure(error) else "failed"
        name = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
        with contextlib.suppress(RuntimeError):
            self._set(f"{kind}/{self.rank}", f"{name}{error}"[:2000])

    def who_is_lost(self, patience: float | None = None) -> str | None:
        """Return, after a failed collective, a sentence about the rank that caused it, or None."""
        seen: dict[int, tuple[str | None, float]] = {}
        others = [rank for rank in range(self.world) if rank != self.rank]
        deadline = time.monotonic() + (2 * NAMING if patience is None else patience)
        try:
            while time.monotonic() < deadline:
                for other in others:
                    if (reason := self._get(f"failed/{other}")) is not None:
                        return f"rank {other} failed: {reason}"
                for other in others:
                    if self._is_silent(other, seen):
                        return self._lost_sentence(other)
                time.sleep(0.2)
            for other in others:
                if (reason := self._get(f"disconnected/{other}")) is not None:
                    return f"rank {other} lost its connection to the others: {reason}"
        except RuntimeError:
            return f"{_STORE_IS_GONE} (or rank 0)"
        return None

    def _is_silent(self, other: int, seen: dict[int, tuple[str | None, float]]) -> bool:
        """Whether a rank that has not left shows no new sign for `NAMING` seconds."""
        beat = self._get(f"beat/{other}")
        left = self._get(f"left/{other}") is not None
        if other not in seen or seen[other][0] != beat or left:
            seen[other] = (beat, time.monotonic())
        return time.monotonic() - seen[other][1] > NAMING

    def close(self) -> None:
        """Leave in good order; an error was reported before."""
        self._closed.set()
        self._thread.join(timeout=15)
        with contextlib.suppress(RuntimeError):
            self._set(f"left/{self.rank}", "")

    def _work(self) -> None:
        """Show signs of life and watch the neighbour's until closed."""
        neighbour, count, failures, lost_since = (self.rank + 1) % self.world, 0, 0, 0.0
        seen = ("", time.monotonic())
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
                lost = _STORE_IS_GONE if failures >= 3 else None
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


def is_connection_failure(error: BaseException) -> bool:
    """Whether an error comes from the connection to other ranks, not from this rank's own work."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _TRANSPORT)
    )


def end_process(sentence: str) -> None:
    """End this process: its main thread is stuck in a collective that will never end."""
    print(
        f"error: {sentence}; this job ends, run the same command again to go on from the last "
        "checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
