"""Ranking first, then by deadline, one step at a time; batches only where all are in time."""

import gc
import math
import threading
import time
import weakref

import pytest

from slipstream.serving.instance.scheduler import (
    HANG_FACTOR,
    HANG_SECONDS,
    Job,
    Kind,
    Scheduler,
)
from slipstream.serving.request_errors import DeadlineError, OverloadError
from tests.support.fake_clock import FakeClock


class Log:
    """A scheduler without a thread, and the events of its jobs in order."""

    def __init__(self, seconds=None, **settings):
        self.events, self.clock = [], FakeClock()
        self.scheduler = Scheduler(
            self._batch,
            seconds or (lambda requests: float(len(requests))),
            clock=self.clock,
            **settings,
        )

    def _batch(self, requests):
        self.events.append(tuple(requests))
        self.clock.moment += len(requests)
        return list(requests)

    def add(self, name, kind=Kind.PREINFER, deadline=100.0, steps=3, estimate=3.0):
        def work():
            for step in range(steps):
                self.events.append(f"{name}{step}")
                self.clock.moment += 1
                yield
            return name

        job = Job(kind, deadline, estimate, self._done(name), steps=work())
        self.scheduler.submit(job)
        return job

    def ask(self, name, deadline, estimate=1.0):
        job = Job(Kind.RANK, deadline, estimate, self._done(name), request=name)
        self.scheduler.submit(job)
        return job

    def _done(self, name):
        return lambda result, error: self.events.append(
            (name, result if error is None else type(error))
        )

    def run(self):
        while self.scheduler.step():
            pass
        return self.events


def test_ranking_overtakes_a_prefill_between_two_steps():
    log = Log()
    log.add("p")
    log.scheduler.step()
    log.ask("r", deadline=50)
    assert log.run() == ["p0", ("r",), ("r", "r"), "p1", "p2", ("p", "p")]


def test_a_step_is_chosen_first_and_run_later():
    log = Log()
    log.add("p")
    chosen = log.scheduler.choose()
    log.ask("r", deadline=50)  # too late for this step, and first at the next
    assert log.events == [] and [job.kind for job in chosen[0]] == [Kind.PREINFER]
    log.scheduler.run(*chosen)
    assert log.run()[:2] == ["p0", ("r",)]


def test_earliest_deadline_first_within_a_kind_and_copies_last():
    log = Log()
    log.add("c", Kind.COPY, deadline=0, steps=1)
    log.add("late", deadline=90, steps=1)
    log.add("early", deadline=10, steps=1)
    log.add("rank", Kind.RANK, deadline=99, steps=1)
    names = [event for event in log.run() if isinstance(event, str)]
    assert names == ["rank0", "early0", "late0", "c0"]


def test_what_cannot_be_in_time_goes_last():
    log = Log(max_batch=1)
    log.ask("hopeless", deadline=2, estimate=3.0)
    log.ask("fine", deadline=4, estimate=1.0)
    assert log.run() == [("fine",), ("fine", "fine"), ("hopeless",), ("hopeless", "hopeless")]


def test_bulk_work_lets_requests_with_later_deadlines_go_first_while_it_has_time():
    log = Log()
    log.add("search", Kind.RANK, deadline=9, steps=3).bulk = True
    log.ask("later", deadline=50)
    assert log.scheduler.backlog(50) == 1.0  # the search is not waited for
    log.scheduler.step()
    assert log.events == [("later",), ("later", "later")]
    log.clock.moment = 4.0  # 3 s to go and 5 s left: less than twice
    log.ask("next", deadline=60)
    assert log.scheduler.backlog(60) == 4.0
    names = [event for event in log.run()[2:] if isinstance(event, str) or len(event) == 1]
    assert names == ["search0", "search1", ("next",), "search2"]  # 1 s to go, 3 s left


def test_a_stale_preinference_is_dropped_if_it_was_not_begun_and_finished_last_if_it_was():
    log = Log()
    for name in ("begun", "waiting"):
        log.add(name, deadline=2, steps=2).expires = 5.0
    log.scheduler.step()
    log.clock.moment = 6.0
    log.add("fresh", deadline=50, steps=1).expires = 60.0
    assert log.run() == [
        "begun0",
        ("waiting", DeadlineError),
        "fresh0",
        ("fresh", "fresh"),
        "begun1",
        ("begun", "begun"),
    ]


def test_overload_costs_those_who_are_late_and_not_everybody():
    """There is half again more work than time; by deadline alone nearly all would be late."""
    log, in_time, sent = Log(max_batch=1), [], 0
    for moment in range(0, 600, 2):
        for _ in range(3):
            deadline, sent = moment + 10.5, sent + 1

            def done(result, error, by=deadline):
                in_time.append(error is None and log.clock.moment <= by)

            log.scheduler.submit(Job(Kind.RANK, deadline, 1.0, done, request=sent))
        while log.clock.moment < moment + 2 and log.scheduler.step():
            pass
    assert sum(in_time) > 0.6 * sent  # two thirds fit


def test_a_passed_deadline_is_not_begun():
    log = Log()
    log.add("r", Kind.RANK, deadline=5)
    log.clock.moment = 5
    assert log.run() == [("r", DeadlineError)]


def test_a_job_someone_waits_for_inherits_the_urgency():
    log = Log()
    log.add("a", deadline=10, steps=1)
    waited = log.add("b", deadline=90, steps=1)
    log.scheduler.hurry(waited, Kind.RANK, 50)
    assert log.run()[0] == "b0"


def test_a_prefill_that_is_late_goes_on_for_those_who_wait():
    log = Log()
    waited = log.add("p", deadline=1, steps=3)
    log.clock.moment = 5
    log.scheduler.hurry(waited, Kind.RANK, 8.5)  # ranking came, and gives it until 8.5
    log.scheduler.hurry(
        waited, Kind.RANK, 6.0
    )  # another one gives it less: more urgent, but not given up for the first
    assert log.run()[-1] == ("p", "p")
    given_up = Log()
    waited = given_up.add("p", deadline=1, steps=9)
    given_up.scheduler.hurry(waited, Kind.RANK, 4.0)
    assert given_up.run() == ["p0", "p1", "p2", "p3", ("p", DeadlineError)]


def test_the_queue_is_bounded_and_backlog_is_predicted():
    log = Log(max_jobs=2)
    log.add("a", deadline=10)
    log.ask("r", deadline=20)
    assert log.scheduler.backlog(30) == 1.0
    assert log.scheduler.backlog(15) == 0.0
    assert log.scheduler.backlog(15, Kind.PREINFER) == 4.0
    with pytest.raises(OverloadError) as refused:
        log.add("b")
    assert refused.value.reason == "queue_full"


def cheaper_together(requests):
    return 1.0 + 0.2 * len(requests)


def test_requests_share_a_pass_while_every_deadline_is_met():
    log = Log(cheaper_together)
    for name, deadline in (("a", 9.0), ("b", 8.0), ("c", 7.0)):
        log.ask(name, deadline, estimate=1.2)
    assert log.run()[0] == ("c", "b", "a")
    tight = Log(cheaper_together)
    for name, deadline in (
        ("a", 9.0),
        ("b", 8.0),
        ("c", 1.5),
    ):  # c alone takes 1.2, with another 1.4, with both 1.6
        tight.ask(name, deadline, estimate=1.2)
    assert tight.run()[0] == ("c", "b")


def test_each_member_of_a_batch_is_told_its_own_share_of_the_time():
    """Else the cost model would learn that a request takes as long as eight."""
    log = Log(cheaper_together)
    jobs = [log.ask("a", 50.0, estimate=3.0), log.ask("b", 50.0, estimate=1.0)]
    begin = log.clock.now()
    assert log.run()[0] == ("a", "b")
    taken = log.clock.now() - begin
    assert taken > 0 and [job.spent for job in jobs] == [0.75 * taken, 0.25 * taken]


def test_no_batch_where_it_does_not_pay():
    log = Log(lambda requests: float(len(requests)) ** 2)
    log.ask("a", 50.0)
    log.ask("b", 50.0)
    assert ("a", "b") not in log.run()


def test_the_batch_is_bounded():
    log = Log(cheaper_together, max_batch=2)
    for name in "abc":
        log.ask(name, 50.0, estimate=1.2)
    assert log.run()[0] == ("a", "b")


def test_errors_and_cancellation_reach_their_own_job():
    log = Log()
    log.add("good", steps=2)

    def broken():
        yield
        raise KeyError("x")

    log.scheduler.submit(Job(Kind.PREINFER, 0.0, 1.0, log._done("bad"), steps=broken()))
    log.scheduler.cancel(log.add("gone"))
    events = log.run()
    assert (
        ("bad", KeyError) in events
        and ("gone", OverloadError) in events
        and ("good", "good") in events
    )
    assert "gone0" not in events


def test_the_thread_ends_and_every_queued_job_gets_an_error():
    running, release, errors = threading.Event(), threading.Event(), []
    scheduler = Scheduler(lambda requests: requests, lambda requests: 0.0)
    scheduler.start()

    def work():
        running.set()
        release.wait(10)
        yield

    scheduler.submit(
        Job(Kind.RANK, time.monotonic() + 60, 1.0, lambda r, e: errors.append(e), steps=work())
    )
    assert running.wait(10)
    scheduler.submit(
        Job(Kind.RANK, time.monotonic() + 60, 1.0, lambda r, e: errors.append(e), request="r")
    )
    release.set()
    scheduler.close()
    with pytest.raises(OverloadError):
        scheduler.submit(Job(Kind.RANK, time.monotonic() + 60, 1.0, lambda r, e: None, request="r"))
    assert errors and not scheduler._thread.is_alive()


def test_a_thread_is_alive_until_a_step_takes_far_longer_than_predicted():
    clock, begun, go_on = FakeClock(), threading.Event(), threading.Event()

    def hang(requests):
        begun.set()
        go_on.wait(30)
        return requests

    scheduler = Scheduler(hang, lambda requests: 1.0, clock=clock)
    assert not scheduler.is_alive(), "it has no thread yet"
    scheduler.start()
    assert scheduler.is_alive()
    scheduler.submit(Job(Kind.RANK, 100.0, 1.0, lambda *_: None, request="r"))
    assert begun.wait(30)
    clock.moment += HANG_SECONDS + HANG_FACTOR * 1.0 - 0.1
    assert scheduler.is_alive()
    clock.moment += 0.2
    assert not scheduler.is_alive()
    go_on.set()
    scheduler.close()
    assert scheduler.is_alive(), "what closes does not hang"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_not_alive():
    scheduler = Scheduler(lambda requests: requests, lambda requests: 1.0)

    def fail(*_: object) -> None:
        raise SystemExit

    scheduler.submit(Job(Kind.RANK, time.monotonic() + 30, 1.0, fail, request="r"))
    scheduler.start()
    scheduler._thread.join(30)
    assert not scheduler.is_alive()


def test_a_job_that_has_ended_keeps_nobody_alive():
    class Waiting:
        """What waits for a job and knows it, as a request does."""

        job: Job

        def hear(self, result, error):
            pass

    scheduler, waiting = Scheduler(lambda requests: requests, lambda _: 0.0), Waiting()
    waiting.job = Job(Kind.RANK, math.inf, 0.0, waiting.hear, request=1)
    scheduler.submit(waiting.job)
    gone = weakref.ref(waiting)
    gc.disable()
    try:
        assert scheduler.step()
        del waiting
        assert gone() is None
    finally:
        gc.enable()
