"""A request router for Ray Serve: every user keeps a replica, by the same rendezvous hashing as our
own router.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from slipstream.serving.router.routing import Member, rendezvous


class UserAffinityRouter(RequestRouter):
    """Orders the replicas by the request's `user`; Ray takes the first that accepts and passes on
    when it is full or gone.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        user = None if pending_request is None else _user_of(pending_request)
        if user is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = rendezvous(user, [Member(name, "") for name in sorted(by_name)])
        return [[by_name[member.name]] for member in order]


def _user_of(request: Any) -> str | None:
    user = request.kwargs.get("user", request.args[0] if request.args else None)
    return user if isinstance(user, str) else None
