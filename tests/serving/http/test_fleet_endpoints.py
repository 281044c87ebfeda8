"""The fleet behind a router: caches, hits, times; an instance that is killed comes back."""

from pathlib import Path

import pytest

from slipstream.serving.http import explore_messages as em
from slipstream.serving.http import messages as m
from slipstream.serving.http.client import Client, RefusalError
from tests.support.serving_fixtures import KEY, deployment, wait_until

HISTORY = m.HistoryMessage(items=[5, 6, 7], timestamps=[10, 20, 30])

pytestmark = pytest.mark.system


def by_name(fleet: em.FleetAnswer) -> dict[str, em.FleetInstance]:
    return {instance.name: instance for instance in fleet.instances}


def test_the_fleet_counts_answers_and_refusals_and_a_killed_instance_comes_back(tmp_path: Path):
    permitted = {"router_settings": {"allow_kill": True}, "allow_kill": True}
    with (
        deployment(tmp_path, **permitted) as supervisor,
        Client(supervisor.url, KEY, deadline_ms=30_000) as client,
    ):
        for number in range(20):
            client.rank(f"user-{number}", [1, 2], HISTORY)
        with pytest.raises(RefusalError):
            client.rank("full", [1], HISTORY)
        fleet = client.fleet()
        assert [each.state for each in fleet.instances] == ["ready", "ready"]
        assert fleet.may_kill and not fleet.draining
        assert fleet.answers["200"] == 20 and fleet.refusals == {"overloaded": 1}
        assert sum(each.requests for each in fleet.instances) == 20
        for each in fleet.instances:
            assert each.p50_ms is not None and 0 < each.p50_ms <= (each.p99_ms or 0)
        assert client.kill("i-1").killed == "i-1"
        wait_until(lambda: by_name(client.fleet())["i-1"].state == "down", 30)
        assert client.rank("user-1", [1], HISTORY).instance == "i-0"
        wait_until(lambda: by_name(client.fleet())["i-1"].state == "ready", 60)
        with pytest.raises(RefusalError, match=r"no instance is called 'x'; there are i-0, i-1"):
            client.kill("x")
        client.drain("i-0")
        assert by_name(client.fleet())["i-0"].state == "draining"


def test_no_instance_is_killed_unless_the_server_was_started_for_it(tmp_path: Path):
    with (
        deployment(tmp_path, instances=1) as supervisor,
        Client(supervisor.url, KEY, deadline_ms=30_000) as client,
    ):
        with pytest.raises(RefusalError, match="--allow-kill"):
            client.kill("i-0")
        assert not client.fleet().may_kill
