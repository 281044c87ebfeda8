"""A client that goes cancels its work; one that stays never notices that it is watched."""

import asyncio
from typing import Any

import pytest

from slipstream.serving.http.gone_client import ClientGoneError, GoneClient


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_client_that_goes_cancels_the_block():
    async def whole() -> None:
        gone, cancelled = asyncio.Event(), []

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().call_later(0.05, gone.set)
        with pytest.raises(ClientGoneError):
            async with GoneClient(receive):
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    cancelled.append(True)
                    raise
        assert cancelled == [True]
        await asyncio.sleep(0)  # the task itself is not cancelled any more

    run(whole())


def test_a_quick_answer_never_looks():
    async def whole() -> None:
        def receive() -> Any:
            raise AssertionError("nobody asked")

        async with GoneClient(receive):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)

    run(whole())


def test_a_server_that_repeats_the_body_does_not_keep_the_watch_busy():
    async def whole() -> int:
        looks = 0

        async def receive() -> dict[str, str]:
            nonlocal looks
            looks += 1
            return {"type": "http.request"}

        async with GoneClient(receive):
            await asyncio.sleep(0.05)
        return looks

    assert run(whole()) == 1


def test_a_slow_answer_ends_its_watch():
    async def whole() -> set[Any]:
        async with GoneClient(never):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0)
        return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert all("_wait" not in str(task) for task in run(whole()))


def test_another_cancellation_stays_what_it_is():
    async def whole() -> None:
        async def work() -> None:
            async with GoneClient(never):
                await asyncio.sleep(30)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(whole())


def test_an_error_of_the_block_passes():
    async def whole() -> None:
        with pytest.raises(ValueError):
            async with GoneClient(never):
                raise ValueError

    run(whole())
