"""The instance as a Ray Serve deployment, for fleets that Ray places over machines (extra `ray`).

    handle = serve.run(relay_app("bundles/ml-1m", history="redis://store:6379/0", replicas=8))
    request = msgspec.json.encode(RankRequest("ann", [1, 2, 3]))
    status, answer = await handle.ask.remote("ann", "rank", request)

The messages are those of the HTTP interface. The first argument names the user, and `ray_router`
keeps users on their replicas. Touch this when an instance is opened in another way.
"""

import os
import time
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig

from slipstream.history.history_store import open_history_store
from slipstream.serving.http.endpoints import ENDPOINTS
from slipstream.serving.http.http_app import RequestContext, problem_body, problem_of
from slipstream.serving.http.instance_app import InstanceSettings, open_versions
from slipstream.serving.http.instance_process import open_instance
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.http.process import SECRET_VARIABLE
from slipstream.serving.router.ticket import TicketSigner

ROUTER = "slipstream.serving.ray_router:UserAffinityRouter"
_ENDPOINTS = {
    endpoint.name: endpoint
    for endpoint in ENDPOINTS
    if endpoint.name in ("preinfer", "rank", "recommend", "events")
}


class RelayInstance:
    """One replica: an instance service around one bundle."""

    def __init__(
        self, bundle: str, history: str, secret: str, deadline_ms: float, model: dict[str, Any]
    ) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        settings = InstanceSettings(name=name, bundle=bundle, history=history, model=model)
        store = open_history_store(history)
        signer = TicketSigner(secret.encode())
        self._service = InstanceService(
            name,
            partial(open_instance, settings),
            store,
            signer,
            open_versions(settings),
        )
        self._handlers, self._deadline = self._service.handlers(), deadline_ms / 1000

    async def ask(self, user: str, endpoint: str, body: bytes) -> tuple[int, bytes]:
        """Answer one message of the HTTP interface: (status, body). `user` chooses the replica."""
        described = _ENDPOINTS.get(endpoint)
        if described is None:
            raise ValueError(f"'{endpoint}' is not one of {', '.join(_ENDPOINTS)}")
        try:
            message = msgspec.json.decode(body, type=described.request)
            answer = await self._handlers[endpoint](
                message, RequestContext(time.monotonic() + self._deadline, {}, {})
            )
        except Exception as error:
            problem = problem_of(error)
            return problem.status, problem_body(problem)
        return described.status, msgspec.json.encode(answer)

    def check_health(self) -> None:
        """Ray calls this; a replica that answers at all is healthy."""


def relay_app(
    bundle: str,
    *,
    history: str,
    replicas: int = 1,
    deadline_ms: float = 1_000.0,
    model: dict[str, Any] | None = None,
) -> Any:
    """Make the Ray Serve application of a bundle.

    All replicas share the ticket secret of this process's environment.
    """
    secret = os.environ.get(SECRET_VARIABLE) or os.urandom(32).hex()
    plain: Any = serve.deployment(RelayInstance)  # Ray types its decorator, not what it returns
    router: Any = ROUTER
    deployment = plain.options(
        num_replicas=replicas,
        max_ongoing_requests=256,
        ray_actor_options={"num_cpus": 0.5},
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    return deployment.bind(bundle, history, secret, deadline_ms, model or {})
