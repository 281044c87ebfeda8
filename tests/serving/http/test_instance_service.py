"""What a request is scored on, stored or sent, ticket or not; reload and drain of an instance."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slipstream.history.history_store import AppendError
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import HttpProblem
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.router.ticket import TicketSigner
from tests.support.serving_service import SECRET, context, opened_service
from tests.support.serving_stand_in import standin_scores

HISTORY = m.HistoryMessage([5, 6, 7], [10, 20, 30])


def serve(tmp_path: Path, work: Callable[[InstanceService], Awaitable[None]], **settings) -> None:
    async def whole() -> None:
        async with opened_service(tmp_path, **settings) as service:
            await work(service)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def append(service: InstanceService, user: str, items: list[int], times: list[int]) -> int:
    request = m.EventsRequest(user, items, times)
    return (await service.events(request, context())).behaviours


def test_a_stored_history_scores_as_the_sent_one_with_or_without_its_ticket(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [5, 6], [10, 20])
        early = await service.preinfer(m.PreinferRequest("ann"), context())
        await append(service, "ann", [7], [30])  # between pre-inference and ranking
        late = await service.rank(m.RankRequest("ann", [1, 2], ticket=early.ticket), context())
        assert (late.hit, late.behaviours) == ("device", 3)
        assert late.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2])
        for request in (m.RankRequest("ann", [1, 2]), m.RankRequest("bob", [1, 2], HISTORY)):
            assert (await service.rank(request, context())).scores == late.scores

    serve(tmp_path, work)


def test_recent_behaviours_come_after_the_stored_ones(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [5], [10])
        recent = m.HistoryMessage([6], [20])
        answer = await service.rank(m.RankRequest("ann", [1], recent=recent), context())
        assert answer.scores["score"] == standin_scores([5, 6], [10, 20], [1])
        early = await service.preinfer(m.PreinferRequest("ann"), context())
        await append(service, "ann", [8], [40])
        with pytest.raises(BadRequest, match="older than stored"):
            request = m.RankRequest("ann", [1], recent=recent, ticket=early.ticket)
            await service.rank(request, context())

    serve(tmp_path, work)


def test_a_long_stored_history_is_cut_to_a_window_that_stays_put(tmp_path: Path):
    items, times = list(range(100)), list(range(100))

    async def work(service: InstanceService) -> None:
        await append(service, "ann", items[:90], times[:90])
        early = await service.preinfer(m.PreinferRequest("ann"), context())
        await append(service, "ann", items[90:93], times[90:93])
        late = await service.rank(m.RankRequest("ann", [1], ticket=early.ticket), context())
        # At most 64, from a multiple of 8: 32 to 90, then to 93.
        assert (early.behaviours, late.behaviours, late.hit) == (58, 61, "device")
        assert late.scores["score"] == standin_scores(items[32:93], times[32:93], [1])
        recent = m.HistoryMessage(items[93:], times[93:])
        more = await service.rank(m.RankRequest("ann", [1], recent=recent), context())
        assert more.scores["score"] == standin_scores(items[40:], times[40:], [1])

    serve(tmp_path, work)


def test_items_of_another_catalogue_are_skipped_and_counted_stored_or_sent(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [5, 10**15, 6], [1, 2, 3])
        sent = m.HistoryMessage([5, 10**15, 6], [1, 2, 3])
        for request in (m.RankRequest("ann", [1]), m.RankRequest("bob", [1], sent)):
            answer = await service.rank(request, context())
            assert answer.scores["score"] == standin_scores([5, 6], [1, 3], [1])
            assert (answer.behaviours, answer.skipped) == (3, 1)
        recent = m.HistoryMessage([-1, 7], [4, 5])
        answer = await service.rank(m.RankRequest("ann", [1], recent=recent), context())
        assert answer.scores["score"] == standin_scores([5, 6, 7], [1, 3, 5], [1])
        assert answer.skipped == 2
        best = await service.recommend(m.RecommendRequest("ann", 3), context())
        assert best.skipped == 1

    serve(tmp_path, work)


def test_unknown_candidates_are_named_and_the_others_scored(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        request = m.RankRequest("ann", [1, -4, "2", "SKU", 10**15], HISTORY, titles=True)
        answer = await service.rank(request, context())
        assert (answer.items, answer.unknown) == ([1, 2], [-4, "SKU", 10**15])
        assert answer.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2])
        assert answer.titles == ["item 1", None]
        nothing = await service.rank(m.RankRequest("ann", ["SKU"], HISTORY), context())
        assert (nothing.items, nothing.scores, nothing.unknown) == ([], {"score": []}, ["SKU"])
        mine = m.RecommendRequest("ann", 5, HISTORY, candidates=[9, "SKU", 5])
        best = await service.recommend(mine, context())
        assert (best.items, best.unknown) == ([9], ["SKU"])

    serve(tmp_path, work)


def test_titles_and_features_come_with_the_answer_where_asked_for(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        plain = await service.recommend(m.RecommendRequest("ann", 3, HISTORY), context())
        assert plain.titles is None and plain.shown is None
        asked = m.RecommendRequest("ann", 3, HISTORY, titles=True, show=["parity"])
        answer = await service.recommend(asked, context())
        assert answer.items == plain.items
        assert answer.shown == {"parity": [item % 2 for item in answer.items]}
        assert answer.titles == [f"item {item}" if item % 2 else None for item in answer.items]
        with pytest.raises(BadRequest, match="known: parity"):
            await service.rank(m.RankRequest("ann", [1], HISTORY, show=["colour"]), context())

    serve(tmp_path, work)


@pytest.mark.parametrize("repeat", ["exclude", "allow"])
def test_seen_is_the_whole_history_and_the_rule_is_the_models(tmp_path: Path, repeat: str):
    items, times = [n % 70 for n in range(100)], list(range(100))  # the window sees 36 … 99

    async def work(service: InstanceService) -> None:
        await append(service, "ann", items, times)
        sent = m.HistoryMessage(items, times)
        for given in ({}, {"history": sent, "allow_truncate": True}):
            for keep_seen in (None, True, False):
                more = {**given, "keep_seen": keep_seen}
                found = await service.recommend(m.RecommendRequest("ann", 200, **more), context())
                own = m.RecommendRequest("ann", 200, candidates=[3, 69, 70, 71], **more)
                ranked = await service.recommend(own, context())
                kept = repeat == "allow" if keep_seen is None else keep_seen
                assert len(found.items) == 200  # what is left out makes room for others
                assert (min(found.items) < 70) == kept
                assert set(ranked.items) == ({3, 69, 70, 71} if kept else {70, 71})
                assert found.behaviours == 64

    serve(tmp_path, work, repeat=repeat, window="latest")


def test_a_long_sent_history_is_refused_unless_its_latest_part_is_enough(tmp_path: Path):
    items, times = list(range(100)), list(range(100))
    sent = m.HistoryMessage(items, times)

    async def work(service: InstanceService) -> None:
        with pytest.raises(BadRequest, match="longer than the 64 this model reads"):
            await service.rank(m.RankRequest("ann", [1], sent), context())
        with pytest.raises(BadRequest, match="allow_truncate"):
            await service.recommend(m.RecommendRequest("ann", 1, sent), context())
        request = m.RankRequest("ann", [1], sent, allow_truncate=True)
        answer = await service.rank(request, context())
        assert answer.scores["score"] == standin_scores(items[36:], times[36:], [1])
        assert (answer.behaviours, answer.truncated) == (64, False)

    serve(tmp_path, work, window="latest")


def test_the_latest_behaviours_are_exactly_those_the_model_sees(tmp_path: Path):
    items, times = list(range(100)), list(range(100))

    async def work(service: InstanceService) -> None:
        await append(service, "ann", items[:93], times[:93])
        answer = await service.rank(m.RankRequest("ann", [1]), context())
        assert answer.scores["score"] == standin_scores(items[29:93], times[29:93], [1])
        recent = m.HistoryMessage(items[93:], times[93:])
        more = await service.rank(m.RankRequest("ann", [1], recent=recent), context())
        assert more.scores["score"] == standin_scores(items[36:], times[36:], [1])

    serve(tmp_path, work, window="latest")


def test_events_are_of_now_unless_they_say_when_and_never_of_the_future(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        before = int(time.time())
        await service.events(m.EventsRequest("ann", ["5", 6]), context())
        stored = await service.user(None, context(user="ann"))
        assert stored.recent.items == [5, 6]
        assert all(before <= at <= time.time() for at in stored.recent.timestamps)
        with pytest.raises(BadRequest, match="milliseconds"):
            await append(service, "ann", [7], [before * 1_000])
        assert await append(service, "ann", [7], [int(time.time()) + 5]) == 3

    serve(tmp_path, work)


def test_a_deleted_user_is_unknown_and_leaves_no_prefix(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        for user in ("a/b", "bob"):
            await append(service, user, [5, 6], [1, 2])
            await service.preinfer(m.PreinferRequest(user), context())
        answer = await service.delete(None, context(user="a/b"))
        assert (answer.user, answer.deleted) == ("a/b", 2)
        with pytest.raises(HttpProblem, match="nothing is stored"):
            await service.rank(m.RankRequest("a/b", [1]), context())
        assert service.instance._kept == {("bob", 2)}
        assert (await service.delete(None, context(user="a/b"))).deleted == 0
        with pytest.raises(BadRequest, match="at most 256"):
            await service.delete(None, context(user="x" * 257))

    serve(tmp_path, work)


def test_the_moment_of_the_request_reaches_the_model(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await service.rank(m.RankRequest("ann", [1], HISTORY, request_time=77), context())
        await service.recommend(m.RecommendRequest("ann", 1, HISTORY, request_time=78), context())
        await service.rank(m.RankRequest("ann", [1], HISTORY), context())
        assert service.instance.request_times == [77, 78, 78, None]

    serve(tmp_path, work)


def test_the_cascade_retrieves_filters_ranks_and_sorts(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [3, 4], [1, 2])
        answer = await service.recommend(m.RecommendRequest("ann", 5, exclude=[8]), context())
        scores = answer.scores["score"]
        assert len(answer.items) == 5 and not {3, 4, 8} & set(answer.items)
        assert scores == sorted(scores, reverse=True)
        assert scores == standin_scores([3, 4], [1, 2], answer.items)
        assert answer.hit == "device"  # pre-inferred while retrieval ran
        own = m.RecommendRequest("ann", 5, candidates=[3, 50, 60])
        assert set((await service.recommend(own, context())).items) == {50, 60}
        nothing = m.RecommendRequest("ann", 5, candidates=[3])
        assert (await service.recommend(nothing, context())).items == []
        kept = m.RecommendRequest("ann", 5, candidates=[3], keep_seen=True)
        assert (await service.recommend(kept, context())).items == [3]
        with pytest.raises(BadRequest, match="no task"):
            await service.recommend(m.RecommendRequest("ann", by="purchase"), context())

    serve(tmp_path, work)


def test_what_is_stored_is_shown_and_continued_only_forward(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        sent = m.EventsRequest("ann ü", [2**63 - 1, 7], [10, 20], {"click": [1.0, 0.0]})
        await service.events(sent, context())
        stored = await service.user(None, context(user="ann ü"))
        assert (stored.behaviours, stored.recent.items) == (2, [2**63 - 1, 7])
        assert stored.recent.actions == {"click": [1.0, 0.0]}
        with pytest.raises(AppendError, match="in order"):
            await append(service, "ann ü", [8], [19])
        with pytest.raises(HttpProblem, match="nothing is stored") as refused:
            await service.user(None, context(user="nobody"))
        assert refused.value.status == 404
        with pytest.raises(HttpProblem, match="nothing is stored"):
            await service.rank(m.RankRequest("nobody", [1]), context())

    serve(tmp_path, work)


def test_a_ticket_names_the_window_and_the_version(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        answer = await service.preinfer(m.PreinferRequest("ann", HISTORY), context())
        ticket = TicketSigner(SECRET).read(answer.ticket, "ann")
        assert (ticket.instance, ticket.version) == ("i-0", "v1")
        assert (ticket.first, ticket.end) == (0, 3)

    serve(tmp_path, work)


def test_a_reload_serves_the_new_version_and_closes_the_old_when_its_requests_are_done(
    tmp_path: Path,
):
    async def work(service: InstanceService) -> None:
        old = service.instance
        running = asyncio.create_task(service.rank(m.RankRequest("ann", [1], HISTORY), context()))
        while not service._uses:
            await asyncio.sleep(0.001)
        same = await service.reload(m.ReloadRequest(), context())
        assert same.before == same.after == {"i-0": "v1"}
        (tmp_path / "version").write_text("v2")
        with pytest.raises(HttpProblem, match="not v3") as refused:
            await service.reload(m.ReloadRequest("v3"), context())
        assert refused.value.status == 409 and service.instance is old
        done = await service.reload(m.ReloadRequest("v2"), context())
        assert (done.before, done.after) == ({"i-0": "v1"}, {"i-0": "v2"})
        assert (await running).version == "v1"
        while not old.closed:
            await asyncio.sleep(0.001)
        later = await service.rank(m.RankRequest("ann", [1], HISTORY), context())
        assert later.version == "v2" and not service.instance.closed

    serve(tmp_path, work, rank_ms=50)


def test_draining_is_reported_and_only_to_its_own_name(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        with pytest.raises(HttpProblem, match="this is instance"):
            await service.drain(m.DrainRequest("i-1"), context())
        assert (await service.readyz(None, context())).status == "ok"
        assert (await service.drain(m.DrainRequest(), context())).draining == "i-0"
        status = await service.status(None, context())
        assert status.draining and not status.ready and status.version == "v1"
        with pytest.raises(HttpProblem) as refused:
            await service.readyz(None, context())
        assert refused.value.status == 503
        assert (await service.healthz(None, context())).status == "ok"

    serve(tmp_path, work)
