"""Which work an instance's one compute thread does next.

Ranking goes before pre-inference, pre-inference before what people explore, that before copies to
the host. Within a kind the earliest deadline goes first, but what can no longer be in time goes
last: under overload the earliest deadline is the least likely to be met, and would delay all
others. Work comes in steps (a chunk of tokens through one layer), and the choice is made again
after every step: a ranking request waits for one step of a long prefill at most. The queue is
bounded. Bulk work (a catalogue searched, thousands of candidates) lets other requests go first
while its own deadline is far. Ranking is given up when its deadline has passed; a pre-inference not
begun when its ranking is over is given up too. Requests are computed together where every one of
them still meets its deadline and the batch is cheaper than its parts. A step that takes far longer
than predicted means that the thread hangs. Touch this when the order of work changes.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.request_errors import DeadlineError, OverloadError

HANG_SECONDS = (
    2.5  # a step longer than this, and than HANG_FACTOR times its job's prediction, hangs
)
HANG_FACTOR = 10.0
PATIENCE = 2.0  # bulk work waits while it could be done twice before its deadline


class Kind(IntEnum):
    """Kinds of work, the urgent ones first."""

    RANK = 0
    PREINFER = 1
    EXPLORE = 2  # explanations and neighbours
    COPY = 3


@dataclass(eq=False)
class Job:
    """Work in steps, or (with `request`) one step that may share a batch.

    `done` is called once, on the compute thread.
    """

    kind: Kind
    deadline: float
    estimate: float  # seconds, as predicted
    done: Callable[[Any, BaseException | None], None]
    steps: Iterator[Any] | None = None
    request: Any = None
    order: int = 0
    spent: float = 0.0
    bulk: bool = False  # long work of many steps, which lets other requests go first
    cancelled: bool = field(default=False)
    # When the work is of no more use: ranking is given up, and a pre-inference not begun.
    expires: float = math.inf

    def __post_init__(self) -> None:
        if self.kind == Kind.RANK:
            self.expires = self.deadline

    @property
    def remaining(self) -> float:
        """The predicted seconds still to come."""
        return max(0.0, self.estimate - self.spent)

    def expired(self, now: float) -> bool:
        """Return whether to give it up; a pre-inference that was begun goes on."""
        return now >= self.expires and (self.kind == Kind.RANK or not self.spent)

    def hopeless(self, now: float) -> bool:
        """Return whether it can no longer be in time, as predicted."""
        return now + self.remaining > self.expires

    def patient(self, now: float) -> bool:
        """Return whether it lets others of its kind go first: it has `PATIENCE` times its time."""
        return self.bulk and now + PATIENCE * self.remaining < self.deadline

    def precedes(self, deadline: float | None, now: float) -> bool:
        """Return whether it goes before a job of its kind that can still meet this deadline."""
        if deadline is None:
            return True
        return self.deadline <= deadline and not self.hopeless(now) and not self.patient(now)

    def urgency(self, now: float) -> tuple[bool, int, bool, bool, float, int]:
        """Return its place in the order of work; the smallest goes first."""
        waits = (self.hopeless(now), self.patient(now))
        return (not self.cancelled, self.kind, *waits, self.deadline, self.order)


def _ended(result: Any, error: BaseException | None) -> None:
    """Take the place of `done` once that was called."""


class Scheduler:
    """The queue and its compute thread."""

    def __init__(
        self,
        run_batch: Callable[[Sequence[Any]], Sequence[Any]],
        batch_seconds: Callable[[Sequence[Any]], float],
        *,
        max_jobs: int = 512,
        max_batch: int = 8,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._run_batch, self._batch_seconds = run_batch, batch_seconds
        self.max_jobs, self.max_batch, self.clock = max_jobs, max_batch, clock
        self._jobs: list[Job] = []
        self._order = 0
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.busy_seconds = dict.fromkeys(Kind, 0.0)
        self.steps_run = self.batches_run = self.batched = 0
        self.longest_step = 0.0
        self._step_ends_by = math.inf  # the present step; later the thread hangs

    # ---- from any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the compute thread."""
        self._thread = threading.Thread(target=self._work, name="slipstream-compute", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; a full queue refuses it with `OverloadError`."""
        with self._wake:
            if self._closing:
                raise OverloadError("closing")
            if len(self._jobs) >= self.max_jobs:
                raise OverloadError("queue_full")
            self._order += 1
            job.order = self._order
            self._jobs.append(job)
            self._wake.notify()

    def hurry(self, job: Job, kind: Kind, deadline: float) -> None:
        """Give a job the urgency of a request that waits for it now."""
        with self._wake:
            if job.kind > kind:  # the deadline so far was expected, the request's is binding
                job.kind, job.deadline, job.expires = kind, deadline, deadline
            else:
                job.deadline, job.expires = min(job.deadline, deadline), max(job.expires, deadline)

    def cancel(self, job: Job) -> None:
        """Remove a job at the next choice; its `done` gets `OverloadError`."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def backlog(self, before: float | None = None, kind: Kind = Kind.RANK) -> float:
        """Predict the seconds of queued work before a job of `kind` with deadline `before`.

        None stands for the latest deadline.
        """
        with self._wake:
            now = self.clock.now()
            return sum(
                job.remaining
                for job in self._jobs
                if job.kind < kind or (job.kind == kind and job.precedes(before, now))
            )

    def waiting(self, kind: Kind) -> int:
        """Return how many jobs of a kind are queued."""
        with self._wake:
            return sum(job.kind == kind for job in self._jobs)

    def is_alive(self) -> bool:
        """Return whether the compute thread moves: it lives, and no step takes far too long."""
        thread = self._thread
        return self._closing or (
            thread is not None and thread.is_alive() and self.clock.now() < self._step_ends_by
        )

    def close(self, timeout: float = 5.0) -> None:
        """End the compute thread after its present step; queued jobs get `OverloadError`."""
        with self._wake:
            self._closing = True
            jobs, self._jobs = self._jobs, []
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)
        for job in jobs:
            job.done(None, OverloadError("closing"))

    # ---- on the compute thread (or step by step in a test) ---------------------------------------

    def step(self) -> bool:
        """Choose and run one step; False when nothing is queued."""
        batch, expired = self.choose()
        if batch:
            predicted = sum(job.estimate for job in batch)
            self._step_ends_by = self.clock.now() + HANG_SECONDS + HANG_FACTOR * predicted
            self.run(batch, expired)
            self._step_ends_by = math.inf
        return bool(batch)

    def choose(self) -> tuple[list[Job], bool]:
        """Return what `run` shall run: a job with those that share its pass, or nothing.

        The second value tells whether the job has expired.
        """
        with self._wake:
            return self._choose()

    def run(self, batch: Sequence[Job], expired: bool) -> None:
        """Run one step of what was chosen, or end it where it was cancelled or has expired."""
        first = batch[0]
        if first.cancelled:
            self._finish(first, None, OverloadError("cancelled"))
        elif expired:
            self._finish(
                first, None, DeadlineError("the deadline passed while the request was waiting")
            )
        elif first.steps is None:
            self._run_requests(batch)
        else:
            self._run_step(first)

    def _choose(self) -> tuple[list[Job], bool]:
        """Return the job to run, with requests that share its pass, and whether it has expired.

        Jobs of one step leave the queue.
        """
        if not self._jobs:
            return [], False
        now = self.clock.now()
        # An expired job is answered at once, whatever else is urgent.
        expired = next((job for job in self._jobs if job.expired(now)), None)
        first = expired or min(self._jobs, key=lambda job: job.urgency(now))
        ends = first.cancelled or first is expired
        batch = [first]
        if first.steps is None and not ends:
            self._add_requests(batch, now)
        if first.steps is None or ends:
            for job in batch:
                self._jobs.remove(job)
        return batch, expired is not None

    def _add_requests(self, batch: list[Job], now: float) -> None:
        """Add the queued requests that may share the pass of the first, the urgent ones first."""
        others = (
            job
            for job in self._jobs
            if job is not batch[0] and job.kind == Kind.RANK and job.steps is None
        )
        for job in sorted(others, key=lambda job: job.urgency(now)):
            if len(batch) == self.max_batch:
                break
            if not job.cancelled and self._may_join(batch, job):
                batch.append(job)

    def _may_join(self, batch: Sequence[Job], job: Job) -> bool:
        """Return whether a larger batch is cheaper than its parts and in time for every member."""
        together = self._batch_seconds([member.request for member in (*batch, job)])
        apart = self._batch_seconds([member.request for member in batch]) + job.estimate
        earliest = min(member.deadline for member in (*batch, job))
        return together < apart and self.clock.now() + together <= earliest

    def _run_requests(self, batch: Sequence[Job]) -> None:
        begin = self.clock.now()
        try:
            results: Sequence[Any] = self._run_batch([job.request for job in batch])
        except BaseException as error:
            for job in batch:
                self._finish(job, None, error)
            return
        taken = self._account(batch[0].kind, begin)
        self.batches_run += len(batch) > 1
        self.batched += len(batch) if len(batch) > 1 else 0
        predicted = sum(job.estimate for job in batch)
        for job, result in zip(batch, results, strict=True):
            # Its share: the others' part of the pass is not what it cost, but what it waited.
            job.spent = taken * (job.estimate / predicted if predicted else 1.0 / len(batch))
            self._finish(job, result, None)

    def _run_step(self, job: Job) -> None:
        begin = self.clock.now()
        try:
            assert job.steps is not None
            next(job.steps)
        except StopIteration as end:
            self._remove(job)
            job.spent += self._account(job.kind, begin)
            self._finish(job, end.value, None)
        except BaseException as error:
            self._remove(job)
            self._finish(job, None, error)
        else:
            job.spent += self._account(job.kind, begin)

    def _account(self, kind: Kind, begin: float) -> float:
        """Note a step that began at `begin` and return its seconds."""
        taken = self.clock.now() - begin
        self.busy_seconds[kind] += taken
        self.steps_run += 1
        self.longest_step = max(self.longest_step, taken)
        return taken

    def _remove(self, job: Job) -> None:
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)

    def _finish(self, job: Job, result: Any, error: BaseException | None) -> None:
        self._remove(job)
        # What waits for a job knows the job: an ended one lets go, so that neither outlives a use.
        done, job.done = job.done, _ended
        done(result, error)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
            self.step()
