"""Stored histories of users over the endpoints: append, show, delete, what is scored."""

import time
from pathlib import Path

import pytest

from slipstream.history.history_store import AppendError
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import HttpProblem
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_service import append, context, with_service
from tests.support.serving_stand_in import standin_scores

HISTORY = m.HistoryMessage([5, 6, 7], [10, 20, 30])


def test_events_are_of_now_unless_they_say_when_and_never_of_the_future(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        before = int(time.time())
        await service.users.events(m.EventsRequest("ann", ["5", 6]), context())
        stored = await service.users.user(None, context(user="ann"))
        assert stored.recent.items == [5, 6]
        assert all(before <= at <= time.time() for at in stored.recent.timestamps)
        with pytest.raises(BadRequest, match="milliseconds"):
            await append(service, "ann", [7], [before * 1_000])
        assert await append(service, "ann", [7], [int(time.time()) + 5]) == 3

    with_service(tmp_path, work)


def test_a_deleted_user_is_unknown_and_leaves_no_prefix(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        for user in ("a/b", "bob"):
            await append(service, user, [5, 6], [1, 2])
            await service.preinfer(m.PreinferRequest(user), context())
        answer = await service.users.delete(None, context(user="a/b"))
        assert (answer.user, answer.deleted) == ("a/b", 2)
        with pytest.raises(HttpProblem, match="nothing is stored"):
            await service.rank(m.RankRequest("a/b", [1]), context())
        assert service.life.instance._kept == {("bob", 2)}
        assert (await service.users.delete(None, context(user="a/b"))).deleted == 0
        with pytest.raises(BadRequest, match="at most 256"):
            await service.users.delete(None, context(user="x" * 257))

    with_service(tmp_path, work)


def test_what_is_stored_is_shown_and_continued_only_forward(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        sent = m.EventsRequest("ann ü", [2**63 - 1, 7], [10, 20], {"click": [1.0, 0.0]})
        await service.users.events(sent, context())
        stored = await service.users.user(None, context(user="ann ü"))
        assert (stored.behaviours, stored.recent.items) == (2, [2**63 - 1, 7])
        assert stored.recent.actions == {"click": [1.0, 0.0]}
        with pytest.raises(AppendError, match="in order"):
            await append(service, "ann ü", [8], [19])
        with pytest.raises(HttpProblem, match="nothing is stored") as refused:
            await service.users.user(None, context(user="nobody"))
        assert refused.value.status == 404
        with pytest.raises(HttpProblem, match="nothing is stored"):
            await service.rank(m.RankRequest("nobody", [1]), context())

    with_service(tmp_path, work)


def test_answers_tell_the_length_of_stored_histories_only(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        told = []
        for call, message in (
            (service.users.events, m.EventsRequest("ann", [1] * 60, list(range(60)))),
            (service.preinfer, m.PreinferRequest("ann")),
            (service.users.events, m.EventsRequest("ann", [1] * 60, list(range(60, 120)))),
            (service.rank, m.RankRequest("ann", [1])),
            (service.recommend, m.RecommendRequest("ann")),
            (service.rank, m.RankRequest("ann", [1], HISTORY)),
        ):
            asked = context()
            await call(message, asked)
            told.append(asked.headers.get("x-slipstream-behaviours"))
        assert told == ["60", "60", "64", "64", "64", None]  # the model sees 64 at most

    with_service(tmp_path, work)


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

    with_service(tmp_path, work)


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

    with_service(tmp_path, work, window="latest")


def test_the_latest_behaviours_are_exactly_those_the_model_sees(tmp_path: Path):
    items, times = list(range(100)), list(range(100))

    async def work(service: InstanceService) -> None:
        await append(service, "ann", items[:93], times[:93])
        answer = await service.rank(m.RankRequest("ann", [1]), context())
        assert answer.scores["score"] == standin_scores(items[29:93], times[29:93], [1])
        recent = m.HistoryMessage(items[93:], times[93:])
        more = await service.rank(m.RankRequest("ann", [1], recent=recent), context())
        assert more.scores["score"] == standin_scores(items[36:], times[36:], [1])

    with_service(tmp_path, work, window="latest")
