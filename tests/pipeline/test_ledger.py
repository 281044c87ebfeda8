"""The ledger wakes who waits for a task, and tells everybody when there is nothing to wait for."""

import threading

import pytest

from slipstream.pipeline.hazards import Task
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.schedule import NESTED

LOAD, ROUTE = Task("load", 0), Task("route", 0)


@pytest.fixture
def ledger():
    return Ledger(NESTED, lanes=1)


def waiting_for(ledger, task):
    """A thread that waits for a task, and the list its answer will be in."""
    answers, started = [], threading.Event()

    def wait():
        started.set()
        answers.append(ledger.wait(task))

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(60)
    return thread, answers


def test_a_task_that_has_ended_is_not_waited_for(ledger):
    ledger.record(LOAD, 1.5, micros=2)
    assert ledger.wait(LOAD) and ledger.ended_at(LOAD) == 1.5 and ledger.micros(0) == 2
    assert ledger.needs(ROUTE) == [LOAD]


def test_a_waiter_wakes_when_its_task_ends(ledger):
    thread, answers = waiting_for(ledger, LOAD)
    ledger.record(LOAD, 1.0, micros=1)
    thread.join(60)
    assert answers == [True]


@pytest.mark.parametrize("reason", ["stop", "end", "close"])
def test_a_waiter_learns_that_its_task_never_ends(ledger, reason):
    thread, answers = waiting_for(ledger, LOAD)
    {"stop": ledger.stop, "end": lambda: ledger.end(0), "close": ledger.close}[reason]()
    thread.join(60)
    assert answers == [False]


def test_the_first_error_is_kept(ledger):
    first = ValueError("first")
    ledger.stop(first)
    ledger.stop(ValueError("second"))
    assert ledger.error is first and ledger.stopping


def test_only_tasks_that_could_run_are_unfinished(ledger):
    ledger.record(LOAD, 1.0, micros=1)
    assert ledger.unfinished("route") == [ROUTE] and ledger.unfinished("place") == []


def test_lanes_are_waited_for_until_all_have_left(ledger):
    assert not ledger.all_left(0.0)
    ledger.leave()
    assert ledger.all_left(60.0)
