"""An instance in virtual time works as a thread would: steps, overtaking, death."""

import asyncio

import pytest

from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.scheduler import Kind
from slipstream.simulate.shared_cores import SharedCores
from slipstream.simulate.simulated_engine import EngineSpec, SimulatedHistory
from slipstream.simulate.simulated_node import SimulatedNode
from slipstream.simulate.virtual_time import VirtualLoop

SPEC = EngineSpec(jitter=0.0)
LONG = SimulatedHistory(1, 0, 3000)
SHORT = SimulatedHistory(2, 0, 20)


def node() -> tuple[VirtualLoop, SimulatedNode]:
    loop = VirtualLoop()
    return loop, SimulatedNode(0, SPEC, InstanceConfig(host_path="x"), loop, 0)


def test_ranking_takes_what_the_pass_takes():
    loop, served = node()
    found = []

    async def ask():
        found.append(await served.instance.rank("2", SHORT, range(50), deadline=9.0))

    loop.create_task(ask())
    loop.run_until_idle()
    query = served.engine.make_query(None, SHORT, range(50))
    assert found[0].hit == "inline"
    assert loop.now == pytest.approx(served.engine.batch_seconds([query]))
    assert served.busy() == pytest.approx(loop.now)


def test_a_ranking_request_overtakes_a_prefill_after_its_present_step():
    loop, served = node()
    ends = {}

    async def prefill():
        await served.instance.rank("1", LONG, range(50), deadline=9.0)
        ends["long"] = loop.now

    async def rank():
        await loop.pause(0.0101)
        began = loop.now
        await served.instance.rank("2", SHORT, range(50), deadline=began + 0.5)
        ends["short"] = loop.now - began

    loop.create_task(prefill())
    loop.create_task(rank())
    loop.run_until_idle()
    step = served.config.slice_seconds
    assert ends["short"] < 2 * step + 0.01 < ends["long"]


def test_whoever_looks_at_the_queue_sees_the_steps_that_have_ended():
    loop, served = node()
    seen = []

    async def prefill():
        await served.instance.rank("1", LONG, range(50), deadline=9.0)

    async def look():
        for _ in range(4):
            await loop.pause(0.02)
            seen.append(served.scheduler.backlog(None, Kind.COPY))

    loop.create_task(prefill())
    loop.create_task(look())
    loop.run_until_idle()
    assert seen == sorted(seen, reverse=True) and seen[0] > seen[2] > 0


def test_what_a_dead_process_held_is_lost_and_its_host_tier_is_not():
    loop, served = node()
    outcome = []

    async def rank(seconds):
        task = asyncio.current_task()
        served.inside.add(task)
        try:
            await served.instance.rank("1", LONG, range(50), deadline=loop.now + seconds)
            outcome.append("answered")
        except asyncio.CancelledError:
            task.uncancel()
            outcome.append("lost")
        finally:
            served.inside.discard(task)

    loop.create_task(rank(9.0))
    loop.run_until_idle()
    shelf, device = served.memory.shelf, served.instance.prefixes.cache
    assert outcome == ["answered"] and len(shelf.records) == 1 and len(device) == 1
    loop.create_task(rank(9.0))
    loop.call_later(0.0001, served.die)
    loop.run_until_idle()
    served.start()
    assert outcome == ["answered", "lost"] and served.lives == 2
    assert len(served.instance.prefixes.cache) == 0
    assert served.instance.prefixes.expander.shelf is shelf
    loop.create_task(rank(9.0))
    loop.run_until_idle()
    assert served.totals()["filled_reloaded"] == 1 and outcome[-1] == "answered"


def test_two_instances_on_one_core_take_twice_as_long_and_account_for_all_of_it():
    ends = {}

    async def ask(served):
        await served.instance.rank("1", LONG, range(50), deadline=9.0)
        return served.busy(), loop.now  # a copy to the host follows

    for cores in (2, 1):
        loop = VirtualLoop()
        shared = SharedCores(loop, cores)
        config = InstanceConfig(host_path="x")
        nodes = [SimulatedNode(n, SPEC, config, loop, 0, cores=shared) for n in range(2)]
        asked = []
        for each in nodes:  # a long history: a prefill in steps, then the ranking
            asked.append(loop.create_task(ask(each)))
        loop.run_until_idle()
        for each in asked:
            busy, ends[cores] = each.result()
            assert busy == pytest.approx(ends[cores])
        assert all(each.scheduler.steps_run > 4 for each in nodes)
    assert ends[1] == pytest.approx(2 * ends[2])
