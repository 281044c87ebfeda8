"""What a request is scored on, stored or sent, ticket or not; reload and drain of an instance."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slipstream.history.history_store import AppendError
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import HttpProblem
from slipstream.serving.http.instance_service import InstanceService, read_history
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


def test_a_message_becomes_a_history_of_arrays():
    message = m.HistoryMessage([2**63 - 1, 7], [1, 1], {"click": [0.5, 1]})
    history = read_history(message, {"age": 3})
    assert history.items.tolist() == [2**63 - 1, 7] and history.timestamps.tolist() == [1, 1]
    assert history.actions["click"].dtype == "float32" and history.user_features == {"age": 3}
    assert (history.first, history.total) == (0, 2)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (m.HistoryMessage([1], []), "1 items but 0 timestamps"),
        (m.HistoryMessage([1, 2], [2, 1]), "oldest first"),
        (m.HistoryMessage([1], [1], {"click": [1, 2]}), "'click' has 2 values for 1"),
    ],
)
def test_a_message_that_contradicts_itself_is_refused(message: m.HistoryMessage, says: str):
    with pytest.raises(BadRequest, match=says):
        read_history(message)


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


def test_items_of_another_catalogue_are_dropped_when_stored_and_refused_when_sent(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [5, 10**15, 6], [1, 2, 3])
        answer = await service.rank(m.RankRequest("ann", [1]), context())
        assert answer.scores["score"] == standin_scores([5, 6], [1, 3], [1])
        with pytest.raises(BadRequest, match="catalogue"):
            sent = m.HistoryMessage([10**15], [1])
            await service.rank(m.RankRequest("ann", [1], sent), context())

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
