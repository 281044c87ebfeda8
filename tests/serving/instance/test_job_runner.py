"""A coroutine gets its job's result or error; buffers are released when the job has ended."""

import asyncio
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.job_runner import JobRunner, RecentWaits
from slipstream.serving.instance.scheduler import Scheduler
from slipstream.serving.request_errors import OverloadError


def runner(**settings):
    scheduler = Scheduler(lambda requests: [r * 2 for r in requests], lambda _: 0.0, **settings)
    scheduler.start()
    return JobRunner(scheduler, CostModel(np.array([1e-3, 0.0, 0.0, 0.0]), 0.0))


def soon():
    return time.monotonic() + 30


def test_the_tail_of_recent_waits_forgets():
    waits = RecentWaits(horizon=5.0)
    assert waits.tail(0.0) == 0.0
    for i in range(100):
        waits.add(1.0, 0.001 * i)
    assert waits.tail(2.0) == pytest.approx(0.099)
    assert waits.tail(7.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(-1, 1)), min_size=1, max_size=40))
def test_the_tail_is_that_of_the_newest_waits_within_the_horizon(passed):
    waits, seen, now = RecentWaits(horizon=5.0, most=16), [], 0.0
    for seconds, wait in passed:
        now += seconds
        waits.add(now, wait)
        seen.append((now, max(0.0, wait)))
        recent = sorted(each for at, each in seen[-16:] if now - at <= 5.0)
        assert waits.tail(now) == recent[min(len(recent) - 1, int(0.99 * len(recent)))]


def test_a_request_and_steps_return_their_results_and_release_once():
    jobs, released, queued = runner(), [], []

    def steps():
        yield
        return "done"

    async def scenario():
        started, release = queued.append, released.append
        ran = jobs.run(soon(), 10.0, request=21, learn="rank", started=started, release=release)
        assert await ran == 42
        assert await jobs.run(soon(), 0.1, steps=steps(), release=release) == "done"

    asyncio.run(scenario())
    assert released == [None, None]  # no error ended them
    assert [job.request for job in queued] == [21]
    assert jobs.cost.factor("rank") < 1 == jobs.cost.factor("inline")  # it was faster than 10 s
    jobs.scheduler.close()


def test_an_error_reaches_the_one_who_waits():
    jobs, released = runner(), []

    def steps():
        yield
        raise KeyError("broken")

    with pytest.raises(KeyError):
        asyncio.run(jobs.run(soon(), 0.1, steps=steps(), release=released.append))
    assert [type(error) for error in released] == [KeyError]
    jobs.scheduler.close()


def test_a_full_queue_releases_at_once():
    jobs, released = runner(max_jobs=0), []
    with pytest.raises(OverloadError):
        asyncio.run(jobs.run(soon(), 0.1, request=1, release=released.append))
    assert [type(error) for error in released] == [OverloadError]
    jobs.scheduler.close()


def test_a_cancelled_request_keeps_its_buffers_until_the_compute_thread_is_done():
    jobs, released = runner(), []
    running, go_on = threading.Event(), threading.Event()

    def steps():
        running.set()
        go_on.wait(30)
        yield

    async def scenario():
        work = jobs.run(soon(), 0.1, steps=steps(), release=lambda _: released.append(1))
        task = asyncio.create_task(work)
        await asyncio.to_thread(running.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not released
        go_on.set()
        while not released:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    jobs.scheduler.close()
