"""The router's app: it sends each request to its user's instance, and the answer's bytes back.

Of a request it reads a few fields (forwarding.py); the length of a stored history it knows
from the user's last answer. It keeps no state that another router would need:
the order of the instances comes from their names, the instance of a user's prefix from the ticket.
When an instance does not answer, the request goes to the next in order, unless that could append
behaviours twice; a request that is refused for overload is tried once elsewhere. A deletion
is repeated on every instance. Touch this when forwarding or retries change; the choice of the
instance is in router/balancer.py, probes in instance_probes.py, the router's own endpoints in
router_admin.py.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.serving.clock import Clock
from slipstream.serving.http.api_keys import Keys
from slipstream.serving.http.connection_table import ConnectionTable
from slipstream.serving.http.endpoints import (
    BACKLOG_HEADER,
    BEHAVIOURS_HEADER,
    DEADLINE_HEADER,
    KEY_HEADER,
    TENANT_HEADER,
    UNKEPT_HEADER,
    no_body,
)
from slipstream.serving.http.fleet_endpoints import FleetEndpoints
from slipstream.serving.http.forwarding import (
    FORWARDED,
    OF_ANY_INSTANCE,
    RoutingFields,
    decode_fields,
    forwarded_handlers,
    forwarded_name,
    user_of_path,
)
from slipstream.serving.http.gate import LOOPBACK_NAMES, Gate, rate_problem
from slipstream.serving.http.gone_client import GoneClient
from slipstream.serving.http.http_app import (
    CALLER,
    NOBODY,
    Caller,
    HttpProblem,
    RequestMetrics,
    build,
    problem_body,
    problem_headers,
    problem_of,
    read_body,
    read_deadline,
    send_answer,
)
from slipstream.serving.http.instance_probes import InstanceProbes
from slipstream.serving.http.limits import Limits, RateLimit
from slipstream.serving.http.membership import Membership, PeerReader
from slipstream.serving.http.observed_request import (
    ID_HEADER,
    TIMING_HEADER,
    ObservedRequest,
    observer,
)
from slipstream.serving.http.request_metrics import sharing
from slipstream.serving.http.router_admin import RouterAdmin
from slipstream.serving.router.balancer import InstanceState, LoadBalancer
from slipstream.serving.router.response_times import ResponseTimes
from slipstream.serving.router.stored_lengths import StoredLengths
from slipstream.serving.router.ticket import Ticket, TicketSigner
from slipstream.serving.router.upstream import (
    ConnectError,
    ConnectionLostError,
    PoolFullError,
    Upstream,
    UpstreamAnswer,
    UpstreamError,
)
from slipstream.serving.tenants import inner_user

PASSED_ON = frozenset({b"content-type", b"retry-after", b"allow", TIMING_HEADER.encode()})
OBSERVED = "slipstream.observed"  # key of an `ObservedRequest` in the scope
GRACE_SECONDS = 0.05  # after the deadline, for the instance's own 504 with its reason
SLOW_SECONDS = 0.5  # a deadline this long is the instance's to meet, not the caller's to extend
_BACKLOG, _DEADLINE = BACKLOG_HEADER.encode(), DEADLINE_HEADER.encode()
_BEHAVIOURS, _UNKEPT = BEHAVIOURS_HEADER.encode(), UNKEPT_HEADER.encode()


class Router:
    """Forwards requests to the instances of a load balancer, and probes these instances."""

    def __init__(
        self,
        balancer: LoadBalancer,
        signer: TicketSigner,
        limits: Limits,
        *,
        instance_key: str = "",
        probe_seconds: float = 0.25,
        probe_timeout: float = 1.0,
        connections: ConnectionTable | None = None,
        rates: RateLimit | None = None,
        allow_kill: bool = False,
    ) -> None:
        self.balancer, self._signer, self._limits = balancer, signer, limits
        self.clock, self._connections = balancer.clock, connections or ConnectionTable()
        self.rates = rates or RateLimit(limits)
        self.upstreams = {i.name: _open_upstream(i, self.clock) for i in balancer.instances}
        key = f"{KEY_HEADER}: {instance_key}\r\n" if instance_key else ""
        self.common = (  # of every request to an instance
            f" HTTP/1.1\r\nhost: instance\r\ncontent-type: application/json\r\n{key}".encode()
        )
        self.counts: Counter[str] = Counter(ticket_expired=0, ticket_invalid=0)
        self.stored = StoredLengths()
        self.times = {i.name: ResponseTimes() for i in balancer.instances}
        self.admin, self.allow_kill = RouterAdmin(self), allow_kill
        self.probes = InstanceProbes(
            balancer, self.upstreams, self.common, probe_seconds, probe_timeout
        )

    # Forwarding

    async def forward(self, scope: Scope, receive: Receive) -> UpstreamAnswer:
        """Forward one request: read it, choose an instance, send it, try the next on failure."""
        deadline = read_deadline(scope, self._limits, self.clock.now())
        body = await read_body(scope, receive, self._limits)
        path: str = scope["path"]
        caller: Caller = scope.get(CALLER, NOBODY)
        ticket, ranks, of_a_user = None, False, user_of_path(scope["method"], path)
        if (scope["method"], path) in OF_ANY_INSTANCE:
            endpoint = OF_ANY_INSTANCE[scope["method"], path]
            if not body and endpoint.request is not None:
                raise HttpProblem(400, "bad_request", no_body(endpoint))
            user, behaviours = body.decode("utf-8", "replace") or path, 0
        elif path in FORWARDED:
            if not body:
                raise HttpProblem(400, "bad_request", no_body(FORWARDED[path]))
            fields = decode_fields(body)
            self._charge(caller, fields)
            user = inner_user(caller.tenant, fields.user)
            ticket = self._signer.find(fields.ticket, user, self.counts)
            ranks = fields.ranks(path)
            behaviours = fields.behaviours(user, self.stored) if ranks else 0
        else:
            assert of_a_user is not None
            user, behaviours = inner_user(caller.tenant, of_a_user[1]), 0
        start = self._start(scope, caller, user)
        async with GoneClient(receive):
            answer = await self._send(scope, start, body, user, behaviours, ranks, ticket, deadline)
            if of_a_user is not None and of_a_user[0] == "delete" and answer.status == 200:
                await self.admin.forget(start, deadline)
        for name, value in answer.headers:
            if name == _BEHAVIOURS:
                self.stored.note(user, int(value))
        return answer

    def _charge(self, caller: Caller, fields: RoutingFields) -> None:
        """Take what a request costs above one from its caller's rate; refuse it where too much."""
        if caller.rate is None and self._limits.requests_per_second is None:
            return
        wait = self.rates.take(caller.slot, max(0.0, fields.cost() - 1), caller.rate)
        if wait:
            raise rate_problem(wait)

    def _start(self, scope: Scope, caller: Caller, user: str) -> bytes:
        """Return the beginning of the request to an instance, up to its deadline and its body."""
        start = f"{scope['method']} ".encode() + _raw_target(scope) + self.common
        if caller.tenant is not None:
            start += f"{TENANT_HEADER}: {caller.tenant}\r\n".encode()
        observed: ObservedRequest | None = scope.get(OBSERVED)
        if observed is not None:
            observed.user = user
            start += observed.forwarded()
        return start

    async def _send(
        self,
        scope: Scope,
        start: bytes,
        body: bytes,
        user: str,
        behaviours: int,
        ranks: bool,
        ticket: Ticket | None,
        deadline: float,
    ) -> UpstreamAnswer:
        """Send a request to one instance after another until one answers.

        A refusal for overload (429) is returned when another instance has refused or failed too.
        """
        named = None if ticket is None else self.probes.owner(ticket.instance)
        owner = named if ticket is not None and ticket.held else None
        repeatable = scope["path"] != "/v1/events"
        observed: ObservedRequest | None = scope.get(OBSERVED)
        tried: set[str] = set()
        refusal: UpstreamAnswer | None = None
        while True:
            left = deadline - self.clock.now()
            instance = self.balancer.choose(user, behaviours, owner=owner, near=named, tried=tried)
            if left <= 0 or instance is None:
                if refusal is not None:
                    return refusal
                raise self._not_sent(left)
            try:
                with self.balancer.outstanding(instance, behaviours):
                    answer = await self._try(instance, start, body, left, timed=behaviours > 0)
            except UpstreamError as error:
                if isinstance(error, ConnectionLostError) and not repeatable:
                    raise HttpProblem(
                        502,
                        "instance_failed",
                        "the instance failed; whether the behaviours were stored is not known, "
                        "see `after`",
                    ) from error
            else:
                if answer.status == 429 and refusal is None and repeatable:
                    refusal = answer
                elif not (answer.status == 503 and instance.draining):
                    if observed is not None:
                        observed.instance = instance.name
                    if ranks and answer.status < 300:
                        kept = all(name != _UNKEPT for name, _ in answer.headers)
                        self.balancer.note_served(user, instance, kept)
                    return answer
            tried.add(instance.name)
            self.counts["retries"] += 1

    def _not_sent(self, left: float) -> HttpProblem:
        """Return why a request was sent to no instance, `left` seconds before its deadline."""
        if left <= 0:
            return HttpProblem(
                504, "deadline_passed", "the deadline passed before an instance could answer"
            )
        self.counts["no_instance"] += 1
        return HttpProblem(
            503, "unavailable", "no instance is ready; try again soon", retry_after=1.0
        )

    async def _try(
        self, instance: InstanceState, start: bytes, body: bytes, left: float, *, timed: bool
    ) -> UpstreamAnswer:
        """Send a request to one instance, `left` seconds before its deadline; note the outcome.

        The time of a request that is `timed` says how fast the instance is.
        """
        head = b"%s: %d\r\ncontent-length: %d\r\n\r\n" % (
            _DEADLINE,
            max(1, left * 1000),
            len(body),
        )
        upstream, sent = self.upstreams[instance.name], self.clock.now()
        try:
            answer = await upstream.request(start + head + body, left + GRACE_SECONDS)
        except UpstreamError as error:
            self._note_failure(instance, error)
            raise
        except TimeoutError:
            self.balancer.note_silence(instance, grave=left >= SLOW_SECONDS)
            raise
        seconds = self.clock.now() - sent if timed and answer.status < 400 else None
        if seconds is not None:
            self.times[instance.name].add(self.clock.now(), seconds)
        late = answer.status == 504 and left < SLOW_SECONDS
        if late and timed:
            seconds = max(left, self.clock.now() - sent)
        self._note_answer(instance, answer, seconds, late=late)
        return answer

    def _note_failure(self, instance: InstanceState, error: UpstreamError) -> None:
        self.counts[error.counter] += 1
        if isinstance(error, ConnectError):
            instance.ready = False  # until a probe finds it again
        if not isinstance(error, PoolFullError):
            self.balancer.note_silence(instance)

    def _note_answer(
        self, instance: InstanceState, answer: UpstreamAnswer, seconds: float | None, *, late: bool
    ) -> None:
        """Note what an answer says of its instance: its backlog, its health.

        An instance is not to blame for a store that is away (503), unless the others do better. One
        that was too `late` for a short deadline did not fail: it was slow, for once, and a burst
        must not take a busy instance away from those that are busy, too.
        """
        for name, value in answer.headers:
            if name == _BACKLOG:
                instance.reported = int(value)
        if answer.status == 503 and b'"draining"' in answer.body:
            instance.draining = True
            return
        self.balancer.note_answer(
            instance,
            failed=answer.status >= 500 and not late,
            seconds=seconds,
            grave=answer.status != 503,
        )

    # Instances that are probed, that join and leave (instance_probes.py, membership.py)

    @contextlib.asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """Probe every instance once, then again and again until the block ends."""
        for instance in self.balancer.instances:
            instance.ready = False
        await self.probes.probe_all()
        for instance in self.balancer.instances:
            self.probes.start(instance)
        try:
            yield
        finally:
            await self.probes.stop_all()
            self.close()

    def add(self, instance: InstanceState) -> None:
        """Take another instance; it gets requests once a probe has found it."""
        self.upstreams[instance.name] = _open_upstream(instance, self.clock)
        self.times[instance.name] = ResponseTimes()
        self.balancer.add(instance)
        self.probes.start(instance)

    def leave(self, instance: InstanceState) -> None:
        """Send an instance nothing new."""
        instance.leaving = True
        self.probes.stop(instance)

    def take_back(self, instance: InstanceState) -> None:
        """Let an instance that was to leave stay."""
        instance.leaving = False
        self.probes.start(instance)

    def drop_if_idle(self, instance: InstanceState) -> bool:
        """Forget an instance that leaves, unless requests to it are under way."""
        name = instance.name
        if self.upstreams[name].busy:
            return False
        self.balancer.remove(instance)
        self.upstreams.pop(name).close()
        del self.times[name]
        self.probes.forget(name)
        return True

    def close(self) -> None:
        """Close the idle connections to the instances."""
        for upstream in self.upstreams.values():
            upstream.close()

    def figures(self) -> Mapping[tuple[str, ...], float]:
        """The router's counts and the last status of every instance, for /metrics."""
        found: dict[tuple[str, ...], float] = {
            (f"router_{name}",): float(count) for name, count in self.counts.items()
        }
        found |= {(f"router_{name}",): value for name, value in self._connections.figures().items()}
        found |= {
            (f"router_ejected_{reason}",): float(count)
            for reason, count in self.balancer.ejected.items()
        }
        for instance in self.balancer.instances:
            name, ready = instance.name, instance.ready and not instance.out
            found["router_outstanding_behaviours", name] = instance.outstanding
            found["router_instance_ready", name] = float(ready)
            found["router_breaker_failures", name] = instance.breaker.failures
            found["router_ejections", name] = instance.ejections
        versions = {status.version for status in self.probes.statuses.values()}
        found["router_versions",] = float(len(versions))
        for name, status in self.probes.statuses.items():
            found |= {(f"instance_{figure}", name): value for figure, value in status.stats.items()}
        return found


def _raw_target(scope: Scope) -> bytes:
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return target + b"?" + query if query else target


def _open_upstream(instance: InstanceState, clock: Clock) -> Upstream:
    if instance.url.startswith("unix:/"):
        return Upstream("", 0, clock, path=instance.url.removeprefix("unix:"))
    address = urlsplit(instance.url)
    if address.scheme != "http" or address.hostname is None or address.port is None:
        raise SlipstreamError(
            f"'{instance.url}' is not the address of an instance; write it as http://HOST:PORT or "
            "unix:PATH"
        )
    return Upstream(address.hostname, address.port, clock)


class RouterApp:
    """The ASGI app: it forwards some paths itself and leaves the others to Starlette."""

    def __init__(
        self,
        router: Router,
        limits: Limits,
        metrics_file: Path | None = None,
        peers: PeerReader | None = None,
    ) -> None:
        self.router, self.fleet = router, FleetEndpoints(router)
        self._members = None if peers is None else Membership(router, peers)
        self.metrics = RequestMetrics(router.figures, ("instance",), file=metrics_file)
        own = {**router.admin.handlers(), **self.fleet.handlers()}
        self._others: ASGIApp = build(
            "router", {**own, **forwarded_handlers()}, limits, self.metrics
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        name = forwarded_name(scope["method"], scope["path"])
        if name is None:
            await self._others(scope, receive, send)
            return
        clock = self.router.clock
        started = clock.now()
        observed = scope[OBSERVED] = observer().begin(scope, name)
        try:
            answer = await self.router.forward(scope, receive)
            status, body = answer.status, answer.body
            headers = [pair for pair in answer.headers if pair[0] in PASSED_ON]
            observed.note_answer(answer.headers)
        except Exception as error:
            problem = problem_of(error)
            status, headers, body = problem.status, problem_headers(problem), problem_body(problem)
            observed.reason = problem.code
        seconds = clock.now() - started
        self.metrics.count(name, status, seconds, observed.hit, observed.reason)
        observer().end(observed, name, status, seconds)
        headers.append((ID_HEADER.encode(), observed.request_id.encode()))
        self.fleet.note(status, body)
        await send_answer(send, status, headers, body)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        members = contextlib.nullcontext() if self._members is None else self._members.following()
        async with self.router.probing(), members, sharing(self.metrics):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def build_router(
    router: Router,
    keys: Keys,
    limits: Limits,
    metrics_file: Path | None = None,
    hosts: frozenset[str] = LOOPBACK_NAMES,
    peers: PeerReader | None = None,
) -> Gate:
    """Build the ASGI app of a router, ready for uvicorn; its file shares what it counts.

    `hosts` are the names it answers to where there are no keys, `peers` the instances of other
    machines.
    """
    app = RouterApp(router, limits, metrics_file, peers)
    return Gate(app, keys, limits, app.metrics, rates=router.rates, hosts=hosts)
