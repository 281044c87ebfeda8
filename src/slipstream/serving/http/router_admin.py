"""The endpoints that a router answers itself: its health, and commands to instances.

Touch this when operators can ask something else of a router.
"""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.http.version_endpoints import VersionEndpoints
from slipstream.serving.router.balancer import InstanceState
from slipstream.serving.router.upstream import ConnectError, UpstreamAnswer, UpstreamError

if TYPE_CHECKING:
    from slipstream.serving.http.router_app import Router


class RouterAdmin:
    """The own endpoints of one router."""

    def __init__(self, router: "Router") -> None:
        self._router, self._balancer = router, router.balancer
        self.draining = False

    def handlers(self) -> dict[str, Handler]:
        """The endpoints that the router answers itself, by name."""
        names = ("healthz", "readyz", "drain", "undrain")
        own: dict[str, Handler] = {name: getattr(self, name) for name in names}
        return own | VersionEndpoints(self.ask, lambda: list(self._balancer.by_name)).handlers()

    async def healthz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Whether the process is alive."""
        return m.HealthAnswer("ok")

    async def readyz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Whether the router takes requests: it is not draining, and an instance is usable."""
        now = self._router.clock.now()
        if self.draining or not any(i.usable(now) for i in self._balancer.instances):
            raise HttpProblem(
                503, "unavailable", "draining" if self.draining else "no instance is ready"
            )
        return m.HealthAnswer("ok")

    async def drain(self, request: m.DrainRequest, context: RequestContext) -> m.DrainAnswer:
        """Drain one instance by name, or this router.

        A draining router is not ready, but it serves the requests that still come.
        """
        if request.instance is None:
            self.draining = True
            return m.DrainAnswer("router")
        instance = self.named(request.instance)
        await self.command(instance, "/admin/drain", b"{}", context.deadline)
        instance.draining = True
        return m.DrainAnswer(instance.name)

    async def undrain(self, request: m.DrainRequest, context: RequestContext) -> m.UndrainAnswer:
        """Take a drained instance, or this router, back into service."""
        if request.instance is None:
            self.draining = False
            return m.UndrainAnswer("router")
        instance = self.named(request.instance)
        await self.command(instance, "/admin/undrain", b"{}", context.deadline)
        instance.draining = False
        return m.UndrainAnswer(instance.name)

    async def ask(self, name: str, path: str, body: bytes, deadline: float) -> bytes:
        """Send an admin request to the instance of a name; return its answer's body."""
        try:
            return (await self.command(self.named(name), path, body, deadline)).body
        except TimeoutError as error:
            raise HttpProblem(
                504, "deadline_passed", f"instance '{name}' did not answer in time"
            ) from error

    async def forget(self, start: bytes, deadline: float) -> None:
        """Repeat the deletion of a user on every instance, once the store has forgotten them.

        Each may hold prefixes that it computed for the user. `start` is the request's beginning.
        """
        commands = (self._send(each, start, b"", deadline) for each in self._balancer.instances)
        found = await asyncio.gather(*commands, return_exceptions=True)
        if any(isinstance(answer, BaseException) or answer.status >= 300 for answer in found):
            raise HttpProblem(
                503,
                "incomplete",
                "the history is deleted, but an instance did not confirm that it forgot what it "
                "computed from it; send the request again",
                retry_after=1.0,
            )

    def named(self, name: str) -> InstanceState:
        instance = self._balancer.by_name.get(name)
        if instance is None:
            known = ", ".join(sorted(self._balancer.by_name))
            raise HttpProblem(
                404, "not_found", f"no instance is called '{name}'; there are {known}"
            )
        return instance

    async def command(
        self, instance: InstanceState, path: str, body: bytes, deadline: float
    ) -> UpstreamAnswer:
        """Send an admin request to one instance; its refusal is raised as the router's own."""
        method = "" if path.startswith("GET ") else "POST "
        start = f"{method}{path}".encode() + self._router.common
        try:
            answer = await self._send(instance, start, body, deadline)
        except UpstreamError as error:
            raise HttpProblem(
                502, "instance_failed", f"instance '{instance.name}' did not answer"
            ) from error
        if answer.status >= 400:
            problem = msgspec.json.decode(answer.body, type=m.Problem)
            raise HttpProblem(
                answer.status, problem.error, f"instance '{instance.name}': {problem.detail}"
            )
        return answer

    async def _send(
        self, instance: InstanceState, start: bytes, body: bytes, deadline: float
    ) -> UpstreamAnswer:
        left = max(0.1, deadline - self._router.clock.now())
        request = start + b"content-length: %d\r\n\r\n" % len(body) + body
        upstream = self._router.upstreams.get(instance.name)
        if upstream is None:
            raise ConnectError  # it has left meanwhile
        return await upstream.request(request, left)
