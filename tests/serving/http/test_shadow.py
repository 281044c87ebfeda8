"""Shadow scoring: the candidate is compared, answers nobody, and is bounded."""

import asyncio
from pathlib import Path

import pytest

from slipstream.serving.http import messages as m
from slipstream.serving.http import shadow
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.http.version_messages import PrepareRequest
from tests.support.serving_service import context, with_service
from tests.support.serving_stand_in import standin_scores, write_standin_bundle

HISTORY = m.HistoryMessage([5, 6, 7], [10, 20, 30])


async def open_candidate(service: InstanceService, tmp_path: Path, share: float = 1.0) -> None:
    write_standin_bundle(tmp_path / "bundle", "v2")
    await service.life.prepare(PrepareRequest(), context())
    await service.life.switch(service.life.record.with_version("v2", 0.0, share), context())


async def rank(service: InstanceService, user: str) -> m.RankAnswer:
    return await service.rank(m.RankRequest(user, [1, 2, 3], HISTORY), context())


def test_every_answer_is_the_stable_versions_and_differences_are_counted(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await rank(service, "ann")
        assert service.shadow.stats()["shadow_compared"] == 0, "there is no candidate yet"
        assert not service.shadow.wants("ann", "v1")
        await open_candidate(service, tmp_path)
        assert service.shadow.wants("ann", "v1") and not service.shadow.wants("ann", "v2")
        for number in range(20):
            answer = await rank(service, f"user {number}")
            assert answer.version == "v1"
            assert answer.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2, 3])
            await asyncio.gather(*service.shadow._running)
        found = service.shadow.stats()
        mine, other = (
            standin_scores([5, 6, 7], [10, 20, 30], [1, 2, 3], version) for version in ("v1", "v2")
        )
        largest = max(abs(a - b) for a, b in zip(mine, other, strict=True))
        assert (found["shadow_compared"], found["shadow_differed"]) == (20, 20)
        assert found["shadow_difference_sum"] == pytest.approx(20 * largest)
        changed = mine.index(max(mine)) != other.index(max(other))
        assert found["shadow_top_changed"] == 20 * changed
        assert service.stats()["shadow_compared"] == 20

    with_service(tmp_path, work)


def test_a_share_of_the_users_is_compared_and_no_more_at_once_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shadow, "MAX_AT_ONCE", 2)

    async def work(service: InstanceService) -> None:
        await open_candidate(service, tmp_path, 0.5)
        users = [f"user {number}" for number in range(100)]
        chosen = [user for user in users if service.life.record.shadows(user)]
        assert 30 < len(chosen) < 70
        await asyncio.gather(*(rank(service, user) for user in users))
        await asyncio.gather(*service.shadow._running)
        found = service.shadow.stats()
        assert found["shadow_skipped"] > 0
        assert found["shadow_compared"] + found["shadow_skipped"] == len(chosen)

    with_service(tmp_path, work, rank_ms=5)


def test_a_candidate_that_fails_costs_nobody_an_answer(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        await open_candidate(service, tmp_path)
        candidate = next(each for each in service.life.instances if each.version == "v2")

        async def fail(*_: object, **__: object) -> None:
            raise TimeoutError

        candidate.rank = fail
        assert (await rank(service, "ann")).version == "v1"
        await asyncio.gather(*service.shadow._running)
        assert service.shadow.stats()["shadow_failed"] == 1

    with_service(tmp_path, work)
