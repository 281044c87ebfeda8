"""A history without a prefix is computed in the pass that scores, and its prefix is kept."""

import asyncio

import numpy as np
import pytest

from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.trigger import TriggerConfig
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_instance import instance, run, settle, soon
from tests.support.serving_samples import candidates, history, largest_difference

ONE_PASS = CostModel(np.array([1e-2, 2e-6, 1e-9, 1e-8]), 1e-10)  # a call costs most


def test_a_ranking_in_line_keeps_its_prefix_without_a_second_pass(tmp_path):
    plain, served = instance(tmp_path, ONE_PASS)  # no host tier, whose copies are steps too
    whole, items = history(300), candidates(30)
    expected = plain.rank(None, whole, items)

    async def scenario():
        first = await served.rank("u", whole, items, deadline=soon())
        steps = served.scheduler.steps_run
        await settle(served)
        again = await served.rank("u", whole, items, deadline=soon())
        longer = await served.rank(
            "u", whole, items, recent=history(3, seed=4), deadline=soon(), request_time=2**40
        )
        return steps, first, again, longer

    steps, first, again, longer = run(scenario())
    assert steps == 1  # not a prefill and a ranking
    assert [first.hit, again.hit, longer.hit] == ["inline", "device", "device"]
    assert largest_difference(first.scores, expected) == 0
    assert largest_difference(again.scores, expected) == 0
    assert served.prefixes.inflight.computed == 1
    assert all(slot.holders == 0 for slot in served.prefixes.cache.slots())
    assert served.backlog == 0
    served.close()


def test_a_prefix_kept_by_a_ranking_is_copied_to_the_host(tmp_path):
    _, served = instance(tmp_path, ONE_PASS, host_path=tmp_path / "shelf")

    async def scenario():
        await served.rank("u", history(300), candidates(30), deadline=soon())
        await settle(served)

    run(scenario())
    assert served.prefixes.inflight.computed == 1 and served.counts["demoted"] == 1
    served.close()


def test_requests_join_a_ranking_that_fills_their_prefix(tmp_path):
    plain, served = instance(tmp_path, ONE_PASS)
    whole, items = history(300), candidates(30)

    async def scenario():
        return await asyncio.gather(
            *(served.rank("u", whole, items, deadline=soon()) for _ in range(4))
        )

    answers = run(scenario())
    assert sorted(answer.hit for answer in answers) == ["inline", "joined", "joined", "joined"]
    expected = plain.rank(None, whole, items)
    assert all(largest_difference(answer.scores, expected) <= 1e-6 for answer in answers)
    served.close()


def test_a_ranking_that_is_given_up_leaves_no_half_filled_prefix(tmp_path):
    _, served = instance(tmp_path, ONE_PASS, threaded=False)

    async def scenario():
        ranking = asyncio.create_task(
            served.rank("u", history(300), candidates(30), deadline=soon())
        )
        while not served.prefixes.inflight.by_key:
            await asyncio.sleep(0)
        ranking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ranking
        while served.scheduler.step():
            pass
        await settle(served)
        assert not list(served.prefixes.cache.slots())
        assert served.prefixes.cache.used == 0 and served.backlog == 0
        with pytest.raises(BadRequest):
            await served.rank("u", history(300), candidates(3), deadline=soon(), request_time=2**70)
        assert not served.prefixes.inflight.by_key and served.prefixes.cache.used == 0

    run(scenario())
    served.close()


def test_a_pass_that_would_hold_up_others_is_computed_in_steps(tmp_path):
    slow = CostModel(np.array([1e-2, 1e-3, 1e-9, 1e-8]), 1e-10)  # 600 tokens take too long at once
    _, served = instance(tmp_path, slow)

    async def scenario():
        return await served.rank("u", history(300), candidates(30), deadline=soon())

    assert run(scenario()).hit == "inline"
    assert served.scheduler.steps_run > 2
    served.close()


def test_prefixes_are_kept_while_enough_users_come_back(tmp_path):
    # A call takes 3 ms, a token 20 us: a prefix of 300 behaviours saves several calls.
    cost = CostModel(np.array([3e-3, 2e-5, 0.0, 1e-9]), 1e-10)
    _, served = instance(tmp_path, cost, trigger=TriggerConfig())
    items = candidates(30)

    async def ask(user: str) -> bool:
        found = await served.rank(user, history(300), items, deadline=soon())
        await settle(served)
        return found.kept

    async def scenario():
        first = await ask("u")
        strangers = [await ask(f"stranger {number}") for number in range(400)]
        again = [await ask(f"stranger {399 - number % 20}") for number in range(200)]
        return first, strangers[-1], again

    first, last_stranger, again = run(scenario())
    assert first and not last_stranger
    assert not again[0] and again[-1]
    served.close()
