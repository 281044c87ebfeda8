"""An instance is drained and replaced; requests in flight keep theirs."""

import asyncio
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import HttpProblem
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.http.version_messages import PrepareRequest
from tests.support.serving_service import append, context, with_service
from tests.support.serving_stand_in import write_standin_bundle

HISTORY = m.HistoryMessage([5, 6, 7], [10, 20, 30])


def test_a_reload_serves_the_new_version_and_closes_the_old_when_its_requests_are_done(
    tmp_path: Path,
):
    async def work(service: InstanceService) -> None:
        old = service.life.instance
        running = asyncio.create_task(service.rank(m.RankRequest("ann", [1], HISTORY), context()))
        while not service.life._uses:
            await asyncio.sleep(0.001)
        assert (await service.life.prepare(PrepareRequest(), context())).version == "v1"
        write_standin_bundle(tmp_path / "bundle", "v2")
        with pytest.raises(HttpProblem, match="not v3") as refused:
            await service.life.prepare(PrepareRequest("v3"), context())
        assert refused.value.status == 409 and service.life.instance is old
        assert (await service.life.prepare(PrepareRequest("v2"), context())).version == "v2"
        assert service.life.instance is old, "what is prepared serves nobody yet"
        record = service.life.record.with_version("v2", 1.0, 0.0)
        done = await service.life.switch(record, context())
        assert (done.before, done.after) == ({"i-0": "v1"}, {"i-0": "v2"})
        assert (await running).version == "v1"
        while not old.closed:
            await asyncio.sleep(0.001)
        later = await service.rank(m.RankRequest("ann", [1], HISTORY), context())
        assert later.version == "v2" and not service.life.instance.closed

    with_service(tmp_path, work, rank_ms=50)


def test_draining_is_reported_and_only_to_its_own_name(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        with pytest.raises(HttpProblem, match="this is instance"):
            await service.life.drain(m.DrainRequest("i-1"), context())
        assert (await service.life.readyz(None, context())).status == "ok"
        assert (await service.life.drain(m.DrainRequest(), context())).draining == "i-0"
        status = await service.life.status(None, context())
        assert status.draining and not status.ready and status.version == "v1"
        with pytest.raises(HttpProblem) as refused:
            await service.life.readyz(None, context())
        assert refused.value.status == 503
        assert (await service.life.healthz(None, context())).status == "ok"
        with pytest.raises(HttpProblem, match="this is instance"):
            await service.life.undrain(m.DrainRequest("i-1"), context())
        assert (await service.life.undrain(m.DrainRequest("i-0"), context())).serving == "i-0"
        assert (await service.life.readyz(None, context())).status == "ok"
        service.life.draining = service.life.ending = True
        with pytest.raises(HttpProblem, match="about to end"):
            await service.life.undrain(m.DrainRequest(), context())

    with_service(tmp_path, work)


def test_an_instance_whose_compute_thread_is_stuck_is_not_ready(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        assert service.life.is_alive()
        service.life.instance.stuck = True
        status = await service.life.status(None, context())
        assert not status.ready and not status.draining and not service.life.is_alive()
        with pytest.raises(HttpProblem, match="compute thread does not move") as refused:
            await service.life.readyz(None, context())
        assert refused.value.status == 503

    with_service(tmp_path, work)


def test_a_version_that_ranks_wrongly_is_refused_and_nothing_has_changed(tmp_path: Path):
    async def work(service: InstanceService) -> None:
        write_standin_bundle(tmp_path / "bundle", "bad1")
        with pytest.raises(SlipstreamError, match="ranks wrongly"):
            await service.life.prepare(PrepareRequest(), context())
        assert service.life.record.open_versions == {"v1"} and len(service.life.instances) == 1
        ranked = await service.rank(m.RankRequest("ann", [1], HISTORY), context())
        assert ranked.version == "v1"

    with_service(tmp_path, work)


def test_a_candidate_serves_its_share_of_the_users_and_always_the_same_ones(tmp_path: Path):
    users = [f"user {number}" for number in range(200)]

    async def versions(service: InstanceService) -> dict[str, str]:
        return {
            user: (await service.rank(m.RankRequest(user, [1], HISTORY), context())).version
            for user in users
        }

    async def work(service: InstanceService) -> None:
        write_standin_bundle(tmp_path / "bundle", "v2")
        await service.life.prepare(PrepareRequest(), context())
        record = service.life.record.with_version("v2", 0.25, 0.0)
        await service.life.switch(record, context())
        first = await versions(service)
        chosen = {user for user, version in first.items() if version == "v2"}
        assert 20 < len(chosen) < 80 and first == await versions(service)
        await service.life.switch(record.with_version("v2", 0.5, 0.0), context())
        second = await versions(service)
        assert chosen < {user for user, version in second.items() if version == "v2"}
        stats = service.stats()
        assert stats["requests_candidate"] + stats["requests_stable"] == 3 * len(users)
        await append(service, "ann", [5], [1])
        await service.users.delete(None, context(user="ann"))  # forgotten by both versions
        candidate = next(each for each in service.life.instances if each.version == "v2")
        await service.life.switch(service.life.record.rolled_back(), context())
        assert set((await versions(service)).values()) == {"v1"}
        while not candidate.closed:
            await asyncio.sleep(0.001)

    with_service(tmp_path, work)
