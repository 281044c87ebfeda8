"""An instance answers as the full pass does, whichever way the prefix came; one flight per key;
refusals have reasons.
"""

import asyncio
import time

import numpy as np
import pytest

from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance, InstanceConfig
from slipstream.serving.instance.trigger import TriggerConfig
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError
from tests.support.serving_samples import candidates, cut, engine, history, largest_difference

COST = CostModel(np.array([1e-4, 2e-6, 1e-9, 1e-8]), 1e-10)
ALWAYS = TriggerConfig(enabled=False)


def instance(tmp_path, cost=COST, **settings):
    served = engine(tmp_path, max_len=1000)
    settings = {"device_bytes": 32 << 20, "host_bytes": 32 << 20, "trigger": ALWAYS} | settings
    path = next(tmp_path.glob("hstu-*"))
    own_cost = CostModel(cost.coefficients, cost.copy_seconds_per_byte)
    return served, Instance(path, InstanceConfig(**settings), own_cost)


def soon(seconds=20.0):
    return time.monotonic() + seconds


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def settle(served):
    """Until nothing is on its way."""
    while served.flights.by_key or served._copies:
        await asyncio.sleep(0.002)


def test_every_way_gives_the_full_pass(tmp_path):
    plain, served = instance(tmp_path, host_path=tmp_path / "shelf")
    whole, items = history(400), candidates(30)
    expected = plain.rank(None, whole, items)

    async def scenario():
        seen = []

        async def rank(past=400, **settings):
            answer = await served.rank(
                "u",
                cut(whole, 0, past),
                items,
                recent=cut(whole, past),
                deadline=soon(),
                **settings,
            )
            assert largest_difference(answer.scores, expected) == 0
            assert not answer.truncated
            seen.append(answer.hit)
            await settle(served)

        await rank()  # nothing there: in line, kept
        await rank()  # still there
        await rank(390)  # another cut of the same sequence: shorter prefix not there, computed
        assert (await served.preinfer("u", cut(whole, 0, 400))).reason == "device"
        for slot in list(served.cache.slots()):  # all leave the device; the host has them
            served.cache.expire(float("inf"))
            served.cache._remove(slot)
        await rank()
        served.cache._remove(next(served.cache.slots()))
        admission = await served.preinfer("u", cut(whole, 0, 380))
        assert admission.admitted
        await rank()  # joins or extends what was begun
        return seen

    seen = run(scenario())
    assert seen[:4] == ["inline", "device", "inline", "host"]
    assert seen[4] in ("joined", "extended")
    stats = served.stats()
    assert stats["hit_device"] == 1 and stats["prefixes_reloaded"] == 1
    served.close()


def test_many_requests_share_one_flight(tmp_path):
    plain, served = instance(tmp_path)
    whole, items = history(700), candidates(20)

    async def scenario():
        await served.preinfer("u", whole)
        await served.preinfer("u", whole)
        return await asyncio.gather(
            *(served.rank("u", whole, items, deadline=soon()) for _ in range(12))
        )

    answers = run(scenario())
    expected = plain.rank(None, whole, items)
    assert all(largest_difference(answer.scores, expected) <= 1e-6 for answer in answers)
    assert served.flights.computed == 1
    assert all(slot.holders == 0 for slot in served.cache.slots())
    served.close()


def test_a_ranking_that_comes_early_joins_the_pre_inference(tmp_path):
    plain, served = instance(tmp_path)
    whole, items = history(1000), candidates(20)

    async def scenario():
        await served.preinfer("u", whole, rank_in=0.0)
        return await served.rank("u", whole, items, deadline=soon())

    answer = run(scenario())
    assert answer.hit == "joined"
    assert largest_difference(answer.scores, plain.rank(None, whole, items)) == 0
    assert served.stats()["late"] == 1
    served.close()


def test_users_do_not_share(tmp_path):
    plain, served = instance(tmp_path)
    items = candidates(10)

    async def scenario():
        await served.preinfer("a", history(300, seed=1))
        return await served.rank("b", history(300, seed=2), items, deadline=soon())

    answer = run(scenario())
    assert answer.hit == "inline"
    assert largest_difference(answer.scores, plain.rank(None, history(300, seed=2), items)) == 0
    served.close()


def test_a_restarted_instance_starts_warm_and_exact(tmp_path):
    shelf, items, whole = tmp_path / "shelf", candidates(10), history(500)
    plain, first = instance(tmp_path, host_path=shelf)

    async def leave():
        await first.rank("u", whole, items, deadline=soon())
        await settle(first)

    run(leave())
    first.close()
    _, second = instance(tmp_path, host_path=shelf)
    assert second.stats()["host_warm"] == 1

    async def come_back():
        return await second.rank("u", whole, items, deadline=soon())

    answer = run(come_back())
    assert answer.hit == "host"
    assert largest_difference(answer.scores, plain.rank(None, whole, items)) == 0
    second.close()


def test_refusals_have_reasons(tmp_path):
    _, served = instance(tmp_path, trigger=TriggerConfig(), ranking_budget=100.0)
    run(served.preinfer("u", history(300)))
    assert served.stats()["refused_not_at_risk"] == 1
    assert run(served.preinfer("u", history(3))).reason == "too_short"
    run(served.drain(1))
    assert run(served.preinfer("u", history(300))).reason == "draining"
    served.close()


def test_deadlines_and_truncation(tmp_path):
    slow = CostModel(np.array([1e-4, 1e-3, 0.0, 0.0]), 1e-10)  # a millisecond a token
    plain, served = instance(tmp_path, cost=slow)
    whole, items = history(900), candidates(5)

    async def scenario():
        with pytest.raises(DeadlineError):
            await served.rank("u", whole, items, deadline=time.monotonic() - 1)
        with pytest.raises(OverloadError, match="truncation was not allowed"):
            await served.rank("u", whole, items, deadline=soon(0.5))
        with pytest.raises(BadRequest, match="not in this bundle"):
            await served.rank("u", whole, [1], deadline=soon())
        with pytest.raises(BadRequest, match="candidates are more"):
            await served.rank("u", whole, [1] * 20_000, deadline=soon())
        return await served.rank("u", whole, items, deadline=soon(0.5), allow_truncate=True)

    answer = run(scenario())
    assert answer.truncated
    differences = [
        largest_difference(answer.scores, plain.rank(None, cut(whole, 900 - n), items))
        for n in range(200, 260)
    ]
    assert min(differences) <= 1e-6  # the full pass over the newest behaviours, however many fitted
    assert served.stats()["overloaded_too_slow"] == 1
    served.close()


def test_a_full_cache_ranks_in_memory_of_its_own(tmp_path):
    plain, served = instance(tmp_path, device_bytes=1 << 19)
    whole, items = history(900), candidates(5)
    answer = run(served.rank("u", whole, items, deadline=soon()))
    assert answer.hit == "inline"
    assert largest_difference(answer.scores, plain.rank(None, whole, items)) == 0
    served.close()


def test_without_the_relay_every_request_is_in_line(tmp_path):
    plain, served = instance(tmp_path, relay=False)
    items = candidates(5)

    async def scenario(whole):
        assert (await served.preinfer("u", whole)).reason == "disabled"
        return [await served.rank("u", whole, items, deadline=soon()) for _ in range(2)]

    cheap = np.array(
        [1e-4, 1e-6, 1e-10, 0.0]
    )  # a prefill for a tenth of a pass: worth two calls for a long history only
    for fill_coefficients, behaviours, apart in (
        (None, 300, False),
        (cheap, 300, True),
        (cheap, 20, False),
    ):
        served.cost.fill_coefficients = fill_coefficients
        whole = history(behaviours)
        assert (served._cheaper_apart(served.engine.encode(whole), 5) is not None) == apart
        steps = served.scheduler.steps_run
        for answer in run(scenario(whole)):
            assert answer.hit == "inline"
            assert largest_difference(answer.scores, plain.rank(None, whole, items)) == 0
        assert (served.scheduler.steps_run - steps > 2) == apart
    served.close()


def test_long_histories_keep_their_prefix_while_they_slide(tmp_path):
    _, served = instance(tmp_path)
    whole, items = history(1600), candidates(5)

    async def scenario():
        hits = []
        for count in (1501, 1503, 1510):
            hits.append((await served.rank("u", cut(whole, 0, count), items, deadline=soon())).hit)
        return hits

    assert run(scenario()) == ["inline", "extended", "extended"]
    served.close()


def test_a_cancelled_request_leaves_nothing_held(tmp_path):
    _, served = instance(tmp_path)
    whole, items = history(900), candidates(200)

    async def scenario():
        task = asyncio.create_task(served.rank("u", whole, items, deadline=soon()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle(served)
        await served.rank("u", whole, items, deadline=soon())

    run(scenario())
    assert all(slot.holders == 0 for slot in served.cache.slots())
    served.close()


def test_retrieve(tmp_path):
    plain, served = instance(tmp_path)
    found = run(served.retrieve(history(50), 5, deadline=soon()))
    assert [item for item, _ in found] == plain.retrieve(history(50), 5)[0]
    served.close()
