"""Prefixes are pinned, found, computed and demoted; nothing stays held, whatever happens."""

import time

from slipstream.serving.instance.scheduler import Kind
from slipstream.serving.request_errors import OverloadError
from tests.support.serving_instance import instance, request_prefix, run, settle, soon
from tests.support.serving_samples import candidates, cut, history, largest_difference


def test_a_full_cache_ranks_in_memory_of_its_own(tmp_path):
    plain, served = instance(tmp_path, device_bytes=1 << 19)
    whole, items = history(900), candidates(5)
    answer = run(served.rank("u", whole, items, deadline=soon()))
    assert answer.hit == "inline"
    assert largest_difference(answer.scores, plain.rank(None, whole, items)) == 0
    served.close()


def test_what_is_ready_or_being_filled_is_pinned_and_nothing_else(tmp_path):
    _, served = instance(tmp_path)
    whole, until = history(300), time.monotonic() + 60

    async def scenario():
        prefixes = served.prefixes
        assert prefixes.pin(request_prefix(served, whole), until) is None
        inflight = prefixes.inflight.start(request_prefix(served, cut(whole, 0, 290)))
        prefixes.submit(inflight, Kind.PREINFER, soon(), None)
        key = inflight.request.key
        assert prefixes.pin(inflight.request, until) == ("joined", key)
        assert prefixes.pin(request_prefix(served, whole), until) == ("joined", key)
        await settle(served)
        assert prefixes.cache.acquire(key).slot.key == key
        assert prefixes.pin(inflight.request, until) == ("device", key)
        assert prefixes.pin(request_prefix(served, whole), until) == ("extended", key)
        assert prefixes.pin(request_prefix(served, whole, user="v"), until) is None
        assert served.prefixes.outstanding_behaviours == 0

    run(scenario())
    served.close()


def test_a_full_queue_leaves_no_slot_behind(tmp_path):
    _, served = instance(tmp_path, max_jobs=0)

    async def scenario():
        inflight = served.prefixes.inflight.start(request_prefix(served, history(300)))
        try:
            served.prefixes.submit(inflight, Kind.PREINFER, soon(), None)
        except OverloadError as refusal:
            return refusal.reason

    assert run(scenario()) == "queue_full"
    assert len(served.prefixes.cache) == 0 and not served.prefixes.inflight.by_key
    assert served.backlog == 0
    served.close()


def test_a_used_prefix_goes_to_the_host_tier_once(tmp_path):
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")

    async def scenario():
        for _ in range(2):
            held, _ = await served.prefixes.compute(request_prefix(served, history(300)), soon())
            served.prefixes.release(held)
            await settle(served)
            slot = next(served.prefixes.cache.slots())
            assert slot.holders == 0
            served.prefixes.cache._remove(slot)

    run(scenario())
    assert served.counts["demoted"] == 1 and len(served.prefixes.expander) == 1
    assert served.prefixes.inflight.reloaded == 1
    served.close()
