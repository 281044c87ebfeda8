"""Users keep their replica in Ray Serve, by the same hashing as in our own router."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.system  # loading Ray takes seconds


def choose(replicas: list[Any], request: Any) -> list[list[str]]:
    from slipstream.serving.ray_router import UserAffinityRouter

    router = UserAffinityRouter.__new__(UserAffinityRouter)  # without Ray's cluster
    ranked = asyncio.run(router.choose_replicas(replicas, request))
    return [[replica.replica_id.unique_id for replica in group] for group in ranked]


def fleet(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def request(*arguments: Any, **named: Any) -> Any:
    return SimpleNamespace(args=arguments, kwargs=named)


def test_the_order_of_a_user_is_that_of_our_router_whatever_ray_lists_first():
    from slipstream.serving.router.hashing import rendezvous_order, seed_of

    names = ["a", "b", "c"]
    for user in ("ann", "bob", "eve"):
        order = [[name] for name in rendezvous_order(user, names, seed_of)]
        assert choose(fleet(*names), request(user, "rank", b"")) == order
        assert choose(fleet(*reversed(names)), request(user=user)) == order


@pytest.mark.parametrize("asked", [None, request(), request(7)])
def test_a_request_without_a_user_may_go_anywhere(asked: Any):
    assert choose(fleet("b", "a"), asked) == [["b", "a"]]
