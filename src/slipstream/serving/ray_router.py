"""A request router for Ray Serve: each user keeps a replica, by the same hashing as our router.

Touch this when Ray changes its interface; the hashing is in router/hashing.py.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from slipstream.serving.router.hashing import rendezvous_order, seed_of


class UserAffinityRouter(RequestRouter):
    """Orders the replicas by the request's `user`; Ray takes the first that accepts."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request; Ray calls this."""
        user = None if pending_request is None else _user_of(pending_request)
        if user is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in rendezvous_order(user, sorted(by_name), seed_of)]


def _user_of(request: Any) -> str | None:
    user = request.kwargs.get("user", request.args[0] if request.args else None)
    return user if isinstance(user, str) else None
