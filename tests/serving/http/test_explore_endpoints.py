"""What people explore with a real instance: model, items, search, neighbours, explain, users."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.history.history_store import open_history_store
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http import explore_messages as em
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import HttpProblem
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.router.ticket import TicketSigner
from slipstream.serving.supervisor_socket import UnpinnedVersions
from tests.support.serving_fixtures import SMALL_MODEL
from tests.support.serving_instance import COST
from tests.support.serving_service import SECRET, append, context
from tests.support.serving_stand_in import read_standin_version

ITEMS = 40
HISTORY = m.HistoryMessage([5, 6, 7, 9], [10, 20, 30, 40])


def explore(tmp_path: Path, work: Callable[[InstanceService], Awaitable[None]]) -> None:
    """Run a coroutine on the service of a retrieval bundle whose items have titles and colours."""
    about = {
        "title": [f"Item No. {number}" for number in range(ITEMS)],
        "feature:colour": ["red", "blue"] * (ITEMS // 2),
    }
    random_bundle(
        tmp_path / "bundle",
        SMALL_MODEL,
        task="retrieval",
        num_items=ITEMS,
        first_id=0,
        about_items=about,
        rules={"name": "shop"},
        noise=0.05,
    )

    async def whole() -> None:
        bundle = tmp_path / "bundle"
        config = InstanceConfig(device_bytes=8 << 20, host_bytes=0)
        store = open_history_store(f"sqlite:{tmp_path / 'history.db'}")
        service = InstanceService(
            "i-0",
            lambda directory, _: Instance(directory, config, COST),
            store,
            TicketSigner(SECRET),
            UnpinnedVersions(lambda: read_standin_version(bundle), bundle),
            1.0,
        )
        try:
            await work(service)
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_the_model_tells_what_its_requests_may_name(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        told = await service.explore.model(None, context())
        assert (told.name, told.task, told.tasks, told.kind) == (
            "shop",
            "retrieval",
            ["score"],
            "hstu",
        )
        assert (told.items, told.max_len, told.titles, told.shows) == (ITEMS, 512, True, ["colour"])
        assert told.timed and not told.repeats and told.version == service.life.instance.version

    explore(tmp_path, work)


def test_items_are_found_by_id_and_by_title_with_their_features(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        named = await service.explore.items(
            em.ItemsRequest([3, "4", -1, "x"], ["colour"]), context()
        )
        assert (named.items, named.unknown) == ([3, 4], [-1, "x"])
        assert named.titles == ["Item No. 3", "Item No. 4"]
        assert named.shown == {"colour": ["blue", "red"]}
        found = await service.explore.search(em.SearchRequest("no. 1", 3), context())
        assert found.items == [1, 10, 11] and found.shown == {}
        nothing = await service.explore.search(em.SearchRequest("lamp", 3), context())
        assert nothing.items == []
        with pytest.raises(BadRequest, match="no item feature"):
            await service.explore.items(em.ItemsRequest([3], ["size"]), context())

    explore(tmp_path, work)


def test_neighbours_have_cosines_and_leave_the_item_itself_out(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        request = em.NeighboursRequest(3, 5, ["colour"])
        found = await service.explore.neighbours(request, context())
        assert len(found.items) == 5 and 3 not in found.items
        assert found.scores is not None and found.scores == sorted(found.scores, reverse=True)
        assert len(found.shown["colour"]) == 5

    explore(tmp_path, work)


def test_an_explanation_is_the_score_with_each_behaviour_left_out(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        found = await service.explore.explain(em.ExplainRequest("ann", 1, HISTORY), context())
        engine = Engine(tmp_path / "bundle")
        for place, left in enumerate(found.without):
            kept = [at for at in range(4) if at != place]
            shorter = m.HistoryMessage(
                [HISTORY.items[at] for at in kept], [HISTORY.timestamps[at] for at in kept]
            )
            ranked = await service.rank(
                m.RankRequest("bob", [1], shorter, request_time=40), context()
            )
            assert left == pytest.approx(ranked.scores["score"][0], abs=1e-5)
        assert found.items == HISTORY.items and found.titles[0] == "Item No. 5"
        np.testing.assert_allclose(found.effects, found.score - np.array(found.without))
        assert (found.task, found.behaviours, found.version) == ("score", 4, engine.version)

    explore(tmp_path, work)


def test_a_stored_history_is_explained_and_unknown_things_are_refused(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await append(service, "ann", [5, 10**9, 6], [1, 2, 3])
        found = await service.explore.explain(em.ExplainRequest("ann", 1, behaviours=1), context())
        assert (found.items, found.behaviours, len(found.effects)) == ([6], 2, 1)
        with pytest.raises(BadRequest, match="is no task"):
            await service.explore.explain(em.ExplainRequest("ann", 1, by="click"), context())
        with pytest.raises(BadRequest, match="not in this bundle"):
            await service.explore.explain(em.ExplainRequest("ann", 10**9), context())
        with pytest.raises(HttpProblem, match="nothing is stored"):
            await service.explore.explain(em.ExplainRequest("nobody", 1), context())

    explore(tmp_path, work)


def test_users_are_listed_in_pages(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        for user in ("cem", "ann", "bob"):
            await append(service, user, [5], [1])

        async def listed(**query: str) -> list[str]:
            asked = context()
            return (await service.explore.users(None, type(asked)(asked.deadline, {}, query))).users

        assert await listed() == ["ann", "bob", "cem"]
        assert await listed(limit="1", after="ann") == ["bob"]
        for limit in ("0", "1001", "x", "-1", "٣"):
            with pytest.raises(BadRequest, match="from 1 to 1000"):
                await listed(limit=limit)
        with pytest.raises(BadRequest, match="256"):
            await listed(after="a" * 257)

    explore(tmp_path, work)


def test_a_request_tells_its_timeline_and_may_be_computed_without_the_relay(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        places = range(300)
        long = m.HistoryMessage([place % ITEMS for place in places], list(places))
        asked = m.RecommendRequest("ann", 5, long, timeline=True, keep_seen=True)
        first = await service.recommend(asked, context())
        again = await service.recommend(asked, context())
        plain = await service.recommend(
            m.RecommendRequest("ann", 5, long, timeline=True, keep_seen=True, relay=False),
            context(),
        )
        assert (first.hit, again.hit, plain.hit) == ("inline", "device", "inline")
        assert first.items == again.items == plain.items
        np.testing.assert_allclose(first.scores["score"], plain.scores["score"], atol=1e-5)
        assert again.timeline is not None
        assert [each.name for each in again.timeline.stages] == ["history", "prefix", "retrieve"]
        for each in again.timeline.stages:
            assert 0 <= each.start_ms <= each.end_ms <= again.timeline.total_ms
        silent = m.RecommendRequest("ann", 5, long, keep_seen=True)
        assert (await service.recommend(silent, context())).timeline is None

    explore(tmp_path, work)
