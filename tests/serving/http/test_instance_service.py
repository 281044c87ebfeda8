"""What a request is scored on, stored or sent, ticket or not."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.serving.http import messages as m
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.request_errors import BadRequest, OverloadError
from slipstream.serving.router.ticket import TicketSigner
from tests.support.serving_service import SECRET, append, context, with_service
from tests.support.serving_stand_in import StandInInstance, StandInItems, standin_scores

HISTORY = m.HistoryMessage([5, 6, 7], [10, 20, 30])


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

    with_service(tmp_path, work)


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

    with_service(tmp_path, work)


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

    with_service(tmp_path, work)


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

    with_service(tmp_path, work)


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

    with_service(tmp_path, work)


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

    with_service(tmp_path, work, repeat=repeat, window="latest")


def test_the_moment_of_the_request_reaches_the_model(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await service.rank(m.RankRequest("ann", [1], HISTORY, request_time=77), context())
        await service.recommend(m.RecommendRequest("ann", 1, HISTORY, request_time=78), context())
        await service.rank(m.RankRequest("ann", [1], HISTORY), context())
        assert service.life.instance.request_times == [77, 78, None]

    with_service(tmp_path, work)


def test_context_of_behaviours_and_of_the_request_reaches_the_model(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        at, sent = {"surface": "home"}, {"surface": ["cart", None]}
        await service.users.events(m.EventsRequest("ann", [5, 6], [1, 2], context=sent), context())
        await service.rank(m.RankRequest("ann", [1], context=at), context())
        assert service.life.instance.labels == {"surface": ["cart", ""]}
        await service.recommend(m.RecommendRequest("ann", 1, context=at), context())
        assert service.life.instance.contexts == [at, at]
        shown = await service.users.user(None, context(user="ann"))
        assert shown.recent.context == sent

    with_service(tmp_path, work)


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

    with_service(tmp_path, work)


def test_the_rules_of_a_request_reach_the_cascade(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [3, 4], [1, 2])
        boost = m.BoostMessage(0.5, where={"genre": ["war"]})
        request = m.RecommendRequest(
            "ann", 2, exclude=[8], allow=[5, 6], most_per={"genre": 1}, boosts=[boost]
        )
        await service.recommend(request, context())
        query = service.life.instance.cascade.queries[-1]
        assert query.retrieve == 200  # what was seen is left out, not fetched in addition
        assert query.rules.exclude.tolist() == [8, 3, 4]
        assert query.rules.allow.tolist() == [5, 6]
        assert (query.rules.most_per, query.rules.boosts[0].add) == ({"genre": 1}, 0.5)

    with_service(tmp_path, work)


def test_a_ticket_names_the_window_and_the_version(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        answer = await service.preinfer(m.PreinferRequest("ann", HISTORY), context())
        ticket = TicketSigner(SECRET).read(answer.ticket, "ann")
        assert (ticket.instance, ticket.version) == ("i-0", "v1")
        assert (ticket.first, ticket.end) == (0, 3)

    with_service(tmp_path, work)


def test_a_useless_ticket_ranks_as_none_and_is_counted(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        stale = TicketSigner(SECRET, lifetime=-1.0).issue("ann", "i-0", "v1", 0, 3)
        of_bob = TicketSigner(SECRET).issue("bob", "i-0", "v1", 0, 3)
        for ticket in (None, stale, of_bob, "forged"):
            request = m.RankRequest("ann", [1], HISTORY, ticket=ticket)
            answer = await service.rank(request, context())
            assert answer.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1])
        stats = service.stats()
        assert (stats["ticket_expired"], stats["ticket_invalid"]) == (1, 2)

    with_service(tmp_path, work)


def test_one_request_appends_and_announces(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        sent = m.EventsRequest("ann", [5, 6], [10, 20], preinfer=m.Announcement(rank_in_ms=50))
        stored = await service.events(sent, context())
        assert stored.behaviours == 2
        assert stored.preinfer is not None and stored.preinfer.admitted
        assert (stored.preinfer.behaviours, stored.preinfer.from_behaviours) == (2, 2)
        ranked = m.RankRequest("ann", [1], ticket=stored.preinfer.ticket)
        assert (await service.rank(ranked, context())).hit == "device"
        plain = await service.events(m.EventsRequest("ann", [7], [30]), context())
        assert (plain.behaviours, plain.preinfer) == (3, None)

    with_service(tmp_path, work)


def test_an_announcement_that_fails_is_no_failure_of_the_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def work(service: InstanceService) -> None:
        async def fail(*_: object, **__: object) -> None:
            raise OverloadError("queue_full")

        monkeypatch.setattr(service.life.instance, "preinfer", fail)
        sent = m.EventsRequest("ann", [5], [10], preinfer=m.Announcement())
        stored = await service.events(sent, context())
        assert (stored.behaviours, stored.preinfer) == (1, None)
        assert (await service.users.user(None, context(user="ann"))).behaviours == 1

    with_service(tmp_path, work)


def test_candidates_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked_up: list[list[object]] = []
    find = StandInItems.find

    def note(self: StandInItems, items: object) -> object:
        looked_up.append(list(items))
        return find(self, items)

    async def work(service: InstanceService) -> None:
        await append(service, "ann", [5, 6, 7], [10, 20, 30])
        looked_up.clear()
        monkeypatch.setattr(StandInInstance, "rank", rank)
        answer = await service.rank(m.RankRequest("ann", [1, -4, 2]), context())
        assert (answer.items, answer.unknown) == ([1, 2], [-4])
        assert [each for each in looked_up if 1 in each] == [[1, -4, 2]]

    async def rank(
        self: StandInInstance, user: str, history: object, candidates: list[int], **asked
    ):
        assert (candidates, asked["rows"].tolist(), asked["recent"]) == ([1, 2], [1, 2], None)
        return SimpleNamespace(scores={}, hit="device", truncated=False, kept=True)

    monkeypatch.setattr(StandInItems, "find", note)
    with_service(tmp_path, work)
