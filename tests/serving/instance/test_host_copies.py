"""Used prefixes reach the host tier when room is scarce, nobody asks, or the process ends."""

import asyncio
import threading

from slipstream.serving.instance import host_copies
from slipstream.serving.instance.cost_model import CostModel
from tests.support.fake_instances import until
from tests.support.serving_instance import COST, instance, request_prefix, run, soon
from tests.support.serving_samples import history


async def _use(served, length: int, user: str) -> None:
    wanted = request_prefix(served, history(length, seed=length), user)
    held, _ = await served.prefixes.compute(wanted, soon())
    served.prefixes.release(held)
    await asyncio.sleep(0.02)


async def _where(served, length: int, user: str) -> str:
    """Where a prefix is found."""
    wanted = request_prefix(served, history(length, seed=length), user)
    held, hit = await served.prefixes.compute(wanted, soon())
    held.release()
    return hit


def test_nothing_is_copied_while_there_is_room_and_requests_come(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 60.0)
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")

    async def scenario():
        for number in range(4):
            await _use(served, 100 + number, f"user {number}")

    run(scenario())
    assert served.counts["demoted"] == 0 and len(served.prefixes.copies) == 4
    served.close()


def test_an_idle_instance_copies_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 0.2)
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")

    async def scenario():
        for number in range(3):
            await _use(served, 100 + number, f"user {number}")
        assert served.counts["demoted"] == 0
        await until(lambda: served.counts["demoted"] == 3)

    run(scenario())
    assert len(served.prefixes.expander) == 3 and not len(served.prefixes.copies)
    served.close()


def test_scarce_room_copies_the_prefix_used_least_recently_before_it_is_evicted(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 60.0)
    one = instance(tmp_path)[0].prefix_bytes(120)
    _, served = instance(tmp_path, device_bytes=4 * one + 4096, host_path=tmp_path / "shelf")

    async def scenario():
        for number in range(3):
            await _use(served, 120, f"user {number}")
        assert served.counts["demoted"] == 0  # a quarter of the room is free
        await _use(served, 120, "user 3")
        await until(lambda: served.counts["demoted"] == 4)
        for number in range(4, 9):
            await _use(served, 120, f"user {number}")
        return await _where(served, 120, "user 0")

    assert run(scenario()) == "host"  # evicted, yet not lost
    assert served.prefixes.cache.evictions > 0
    served.close()


def test_an_ending_process_leaves_its_prefixes_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 60.0)
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")

    async def scenario():
        await _use(served, 100, "ann")
        await served.keep_prefixes(20)

    run(scenario())
    served.close()
    _, second = instance(tmp_path, host_path=tmp_path / "shelf")

    assert run(_where(second, 100, "ann")) == "host"
    second.close()


def test_prefixes_that_are_gone_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 60.0)
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")

    async def scenario():
        await _use(served, 100, "kept")
        for number in range(80):
            await _use(served, 100, f"user {number}")
            served.prefixes.forget(f"user {number}")
        return len(served.prefixes.copies)

    assert run(scenario()) <= 67
    assert [slot.holders for slot in served.prefixes.cache.slots()] == [0]
    served.close()


def test_the_host_tier_takes_memory_in_the_background_and_copies_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(host_copies, "GROWTH_REST", 0.0)
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")
    shelf, threads = served.prefixes.expander.shelf, []
    allocate = shelf._allocate

    def noted(file: int, nbytes: int) -> bool:
        threads.append((threading.current_thread() is threading.main_thread(), nbytes))
        return allocate(file, nbytes)

    monkeypatch.setattr(shelf, "_allocate", noted)

    async def scenario():
        for number in range(12):
            await _use(served, 900, f"user {number}")
        await until(lambda: served.counts["demoted"] == 12)

    run(scenario())
    assert threads and not any(main for main, _ in threads)
    assert {nbytes for _, nbytes in threads} == {host_copies.GROWTH_BYTES}
    served.close()


def test_copies_that_nobody_reads_end_and_begin_again_when_evicted_users_return(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(host_copies, "IDLE_SECONDS", 60.0)
    monkeypatch.setattr(host_copies, "REMEMBERED", 40.0)
    dear = CostModel(COST.coefficients, COST.copy_seconds_per_byte)
    plain = instance(tmp_path)[0]
    one = plain.prefix_bytes(120)
    # Reading or writing a copy takes a quarter of what the prefix takes to compute.
    dear.copy_seconds_per_byte = COST.prefill_seconds(plain.cached_tokens(120)) / one / 4
    settings = {"device_bytes": 4 * one + 4096, "host_path": tmp_path / "shelf"}
    _, served = instance(tmp_path, cost=dear, **settings)

    async def ask(users):
        before = served.counts["demoted"]
        for number in users:
            await _use(served, 120, f"user {number}")
        await until(lambda: not served.prefixes.copies.underway)
        return served.counts["demoted"] - before

    async def scenario():
        first = await ask(range(100))  # every user once
        second = await ask(range(100, 140))
        returning = await ask([*range(200, 212)] * 12)  # more than the device tier holds
        return first, second, returning

    first, second, returning = run(scenario())
    assert 0 < first < 100 and second == 0
    assert returning >= 12 and served.prefixes.inflight.reloaded > 0
    served.close()
