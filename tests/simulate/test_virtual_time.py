"""Virtual time jumps from event to event, in order, and keeps errors."""

import asyncio
import gc

import pytest

from slipstream.simulate.virtual_time import COLLECT_AFTER, VirtualClock, VirtualLoop


def test_coroutines_sleep_without_waiting_and_in_order():
    loop, seen = VirtualLoop(), []

    async def work(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, loop.time()))
        await loop.pause(1000.0)
        seen.append((name, loop.time()))

    for name, seconds in (("late", 7200.0), ("soon", 1.0)):
        loop.create_task(work(name, seconds))
    loop.run_until_idle()
    assert seen == [("soon", 1.0), ("soon", 1001.0), ("late", 7200.0), ("late", 8200.0)]


def test_asyncio_wait_ends_at_its_timeout():
    loop, found = VirtualLoop(), []

    async def work():
        done, waiting = await asyncio.wait([loop.create_future()], timeout=3.0)
        found.append((len(done), len(waiting), loop.now))

    loop.create_task(work())
    loop.run_until_idle()
    assert found == [(0, 1, 3.0)]


def test_a_cancelled_call_is_skipped_and_a_run_may_stop_before_the_end():
    loop, seen = VirtualLoop(), []
    loop.call_later(1.0, seen.append, "cancelled").cancel()
    loop.call_later(2.0, seen.append, "two")
    loop.call_later(5.0, seen.append, "five")
    loop.run_until_idle(until=3.0)
    assert seen == ["two"] and loop.now == 2.0
    loop.run_until_idle()
    assert seen == ["two", "five"]


def test_an_error_that_nobody_waits_for_ends_the_run():
    loop = VirtualLoop()

    async def fail():
        raise ValueError("broken")

    task = loop.create_task(fail())
    with pytest.raises(ValueError, match="broken"):
        loop.call_later(1.0, lambda: loop.call_exception_handler({"exception": task.exception()}))
        loop.run_until_idle()


def test_a_clock_stands_at_the_beginning_of_a_step_while_it_is_accounted_for():
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    loop.call_later(5.0, lambda: None)
    loop.run_until_idle()
    clock.shift = -2.0
    assert clock.now() == clock.wall_time() == 3.0


@pytest.mark.parametrize("usual", [(700, 10, 10), (0, 10, 10), (90_000, 5, 5)])
def test_garbage_is_collected_as_before_after_a_run_that_failed(usual):
    before, during = gc.get_threshold(), []
    gc.set_threshold(*usual)
    try:
        loop = VirtualLoop()
        loop.call_soon(lambda: during.append(gc.get_threshold()[0]))
        loop.call_soon(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.run_until_idle()
        assert gc.get_threshold() == usual
        assert during == [max(usual[0], COLLECT_AFTER) if usual[0] else 0]
    finally:
        gc.set_threshold(*before)
