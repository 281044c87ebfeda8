"""An instance scores as the full pass does, wherever the prefix is; refusals have reasons."""

import asyncio
import time

import numpy as np
import pytest

from slipstream.serving.engine.item_rules import ItemRules
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.recommend_query import RecommendQuery
from slipstream.serving.instance.trigger import TriggerConfig
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError
from tests.support.fake_clock import FakeClock
from tests.support.serving_instance import instance, run, settle, soon
from tests.support.serving_samples import candidates, cut, history, largest_difference


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
        for slot in list(served.prefixes.cache.slots()):  # all leave the device; the host has them
            served.prefixes.cache._remove(slot)
        await rank()
        served.prefixes.cache._remove(next(served.prefixes.cache.slots()))
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


def test_rows_that_were_looked_up_before_are_not_looked_up_again(tmp_path, monkeypatch):
    plain, served = instance(tmp_path)
    whole, items = history(50), candidates(30)
    rows, expected = served.items.find(items), plain.rank(None, whole, items)
    encoded, looked_up = served.engine.encode(whole), []
    monkeypatch.setattr(served.items, "rows", looked_up.append)
    answer = run(served.rank("u", encoded, items, deadline=soon(), rows=rows))
    assert largest_difference(answer.scores, expected) == 0 and not looked_up
    served.close()


def test_many_requests_share_one_computation(tmp_path):
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
    assert served.prefixes.inflight.computed == 1
    assert all(slot.holders == 0 for slot in served.prefixes.cache.slots())
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
    slow = CostModel(np.array([1e-4, 4e-2, 0.0, 0.0]), 1e-10)  # 40 milliseconds a token
    plain, served = instance(tmp_path, cost=slow)
    whole, items = history(900), candidates(5)

    async def scenario():
        with pytest.raises(DeadlineError):
            await served.rank("u", whole, items, deadline=time.monotonic() - 1)
        with pytest.raises(OverloadError, match="truncation was not allowed"):
            await served.rank("u", whole, items, deadline=soon(20))
        with pytest.raises(BadRequest, match="not in this bundle"):
            await served.rank("u", whole, [1], deadline=soon())
        with pytest.raises(BadRequest, match="candidates are more"):
            await served.rank("u", whole, [1] * 20_000, deadline=soon())
        return await served.rank("u", whole, items, deadline=soon(20), allow_truncate=True)

    answer = run(scenario())
    assert answer.truncated
    differences = [
        largest_difference(answer.scores, plain.rank(None, cut(whole, 900 - n), items))
        for n in range(150, 260)
    ]
    assert min(differences) <= 1e-6  # the full pass over the newest behaviours, however many fitted
    assert served.stats()["overloaded_too_slow"] == 1
    served.close()


def test_without_the_relay_every_request_is_in_line(tmp_path):
    plain, served = instance(tmp_path, relay=False)
    items = candidates(5)

    async def scenario(whole):
        assert (await served.preinfer("u", whole)).reason == "disabled"
        return [await served.rank("u", whole, items, deadline=soon()) for _ in range(2)]

    # A prefill for a tenth of a pass: worth two calls for a long history only.
    cheap = np.array([1e-4, 1e-6, 1e-10, 0.0])
    for fill_coefficients, behaviours, apart in (
        (None, 300, False),
        (cheap, 300, True),
        (cheap, 20, False),
    ):
        served.cost.fill_coefficients = fill_coefficients
        whole = history(behaviours)
        seconds = served.estimates.separate_prefill_seconds(behaviours, 5)
        assert (seconds is not None) == apart
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
        while not served.scheduler.steps_run:  # until it is being computed
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle(served)
        await served.rank("u", whole, items, deadline=soon())

    run(scenario())
    assert all(slot.holders == 0 for slot in served.prefixes.cache.slots())
    served.close()


def test_retrieval_gives_what_the_engine_gives(tmp_path):
    plain, served = instance(tmp_path)
    whole = history(50)
    query = RecommendQuery(5, soon(), rules=ItemRules(exclude=whole.items))
    found = run(served.cascade.recommend("u", whole, query))
    assert (found.items, found.scores["click"]) == plain.retrieve(whole, 5)
    served.close()


def test_what_a_service_asks_of_an_instance(tmp_path):
    plain, served = instance(tmp_path)
    assert (served.version, served.max_len, served.tasks) == (plain.version, 1000, plain.tasks)
    known = served.items.contains(np.array([history(1).items[0], 1]))
    assert known.tolist() == [True, False] and served.backlog == 0
    assert (served.actions, served.timed) == (("click", "like"), True)
    served.close()


def test_the_moment_of_a_request_counts_with_a_prefix_or_without(tmp_path):
    plain, served = instance(tmp_path)
    whole, items = history(400), candidates(5)
    later = int(whole.timestamps[-1]) + 10**6
    expected = plain.rank(None, whole, items, request_time=later)
    assert largest_difference(expected, plain.rank(None, whole, items)) > 0

    async def scenario():
        await served.preinfer("ann", whole)
        return [
            await served.rank(user, whole, items, deadline=soon(), request_time=later)
            for user in ("ann", "bob")
        ]

    for answer in run(scenario()):
        assert largest_difference(expected, answer.scores) == 0
    query = RecommendQuery(5, soon(), request_time=later)
    found = run(served.cascade.recommend("ann", whole, query))
    expected = plain.retrieve(whole, 5, request_time=later, exclude_seen=False)
    assert (found.items, found.scores["click"]) == expected
    served.close()


def test_a_forgotten_user_leaves_no_prefix_in_any_tier(tmp_path):
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")
    whole, items = history(400), candidates(5)

    async def scenario():
        for user in ("ann", "bob"):
            await served.preinfer(user, whole)
            await served.rank(user, whole, items, deadline=soon())
        await settle(served)
        assert len(served.prefixes.cache) == len(served.prefixes.expander) == 2
        await served.preinfer("ann", whole)  # pinned: no reason to keep it
        await served.forget("ann", soon())
        again = await served.rank("bob", whole, items, deadline=soon())
        return again, await served.rank("ann", whole, items, deadline=soon())

    kept, computed = run(scenario())
    assert (kept.hit, computed.hit) == ("device", "inline")
    served.close()


def test_a_user_is_forgotten_when_nothing_uses_the_prefix_any_more(tmp_path):
    _, served = instance(tmp_path)
    whole = history(400)

    async def scenario():
        await served.preinfer("ann", whole)
        assert not served.prefixes.forget("ann")  # being filled
        with pytest.raises(DeadlineError):
            await served.forget("ann", time.monotonic())
        await settle(served)
        (slot,) = served.prefixes.cache.of_user("ann")
        with served.prefixes.cache.acquire(slot.key):
            assert not served.prefixes.forget("ann")
        assert served.prefixes.forget("ann") and not len(served.prefixes.cache)

    run(scenario())
    served.close()


def test_a_discarded_instance_takes_its_host_tier_with_it(tmp_path):
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")
    assert (tmp_path / "shelf").exists()
    served.discard()
    assert not (tmp_path / "shelf").exists()


def test_a_pre_inference_that_joins_an_in_line_computation_is_pinned(tmp_path):
    _, served = instance(tmp_path)
    whole, items = history(900), candidates(5)

    async def scenario():
        ranking = asyncio.create_task(served.rank("u", whole, items, deadline=soon()))
        while not served.prefixes.inflight.by_key:
            await asyncio.sleep(0)
        assert (await served.preinfer("u", whole, rank_in=0.5)).reason == "joined"
        assert (await ranking).hit == "inline"
        (slot,) = served.prefixes.cache.slots()
        assert slot.pinned_until is not None  # for the ranking that was announced
        assert (await served.rank("u", whole, items, deadline=soon())).hit == "device"
        assert slot.pinned_until is None

    run(scenario())
    served.close()


def test_signals_for_later_cannot_fill_the_cache(tmp_path):
    clock = FakeClock(1_000.0)
    _, served = instance(tmp_path, device_bytes=4 << 20, clock=clock)

    async def scenario():
        for number in range(11):
            await served.preinfer(f"u{number}", history(600, seed=number), rank_in=600.0)
            await settle(served)
        cache = served.prefixes.cache
        assert 0 < cache.pinned <= 0.8 * cache.budget
        clock.moment += served.config.max_pin
        served.stats()
        assert cache.pinned == 0

    run(scenario())
    served.close()


def test_a_short_ranking_overtakes_one_of_many_candidates(tmp_path, monkeypatch):
    for place in ("engine.passes", "instance.instance"):
        monkeypatch.setattr(f"slipstream.serving.{place}.CANDIDATE_TILE", 20)
    plain, served = instance(tmp_path, threaded=False)
    whole, many, few = history(60), candidates(300), candidates(5)
    order = []

    async def rank(name, items, seconds):
        answer = await served.rank(name, whole, items, deadline=soon(seconds))
        assert largest_difference(answer.scores, plain.rank(None, whole, items)) == 0
        order.append(name)

    async def scenario():
        long = asyncio.create_task(rank("long", many, 20))
        while not any(job.bulk and job.spent for job in served.scheduler._jobs):
            served.scheduler.step()
            await asyncio.sleep(0)
        short = asyncio.create_task(rank("short", few, 30))  # due later
        while not (long.done() and short.done()):
            served.scheduler.step()
            await asyncio.sleep(0)

    run(scenario())
    assert order == ["short", "long"]
    served.close()


def test_the_backlog_is_told_in_behaviours_as_routers_count(tmp_path):
    """A behaviour of a ranking bundle is two tokens: a router must not see twice the work."""
    _, served = instance(tmp_path, threaded=False)

    async def scenario():
        early = asyncio.create_task(served.preinfer("u", history(300)))
        while not served.scheduler._jobs:
            await asyncio.sleep(0)
        assert served.backlog == 300
        while served.scheduler.step() or not early.done():
            await asyncio.sleep(0)
        assert served.backlog == 0

    run(scenario())
    served.close()
