"""The fleet as its router sees it: instances, caches, hits, response times, refusals; killing one.

Figures come from the latest probe of each instance, so a request costs the router little. Touch
this when the fleet should tell more about itself.
"""

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from slipstream.serving.http import explore_messages as em
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.http.instance_lifecycle import refuse_kill
from slipstream.serving.router.balancer import InstanceState
from slipstream.serving.router.response_times import percentile
from slipstream.serving.router.upstream import ConnectionLostError

if TYPE_CHECKING:
    from slipstream.serving.http.router_app import Router


class FleetEndpoints:
    """What a router tells of its instances, and the end of one of them."""

    def __init__(self, router: "Router") -> None:
        self._router = router
        self.answers: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._started = router.clock.now()

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of every endpoint by its name."""
        return {"fleet": self.fleet, "kill": self.kill, "page": self.page}

    def note(self, status: int, body: bytes) -> None:
        """Count a forwarded request's answer, a refusal by its code."""
        self.answers[str(status)] += 1
        if status >= 400:
            try:
                self.refusals[msgspec.json.decode(body, type=m.Problem).error] += 1
            except msgspec.DecodeError:
                self.refusals["unknown"] += 1

    async def fleet(self, _message: None, context: RequestContext) -> em.FleetAnswer:
        """Tell the state of every instance."""
        router = self._router
        return em.FleetAnswer(
            [self._instance(each) for each in router.balancer.instances],
            dict(self.answers),
            dict(self.refusals),
            router.admin.draining,
            router.allow_kill,
            router.clock.now() - self._started,
        )

    def _instance(self, instance: InstanceState) -> em.FleetInstance:
        router, now = self._router, self._router.clock.now()
        status = router.probes.statuses.get(instance.name)
        stats = {} if status is None else status.stats
        times = router.times[instance.name].recent(now)
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        return em.FleetInstance(
            instance.name,
            _state(instance, now),
            "" if status is None else status.version,
            pool=instance.pool,
            started_at=stats.get("start_time_seconds"),
            outstanding=instance.outstanding,
            backlog=instance.reported,
            requests=len(times),
            p50_ms=None if p50 is None else 1_000 * p50,
            p99_ms=None if p99 is None else 1_000 * p99,
            device=_tier(stats, "device"),
            host=_tier(stats, "host") if "host_bytes" in stats else None,
            hits=_counts(stats, "hit_"),
            preinfer_admitted=int(stats.get("preinfer_admitted", 0)),
            preinfer_refused=_counts(stats, "refused_"),
            overloaded=_counts(stats, "overloaded_"),
        )

    async def page(self, _message: None, context: RequestContext) -> em.PageAnswer:
        """Tell the web page that there is one model; runs and simulations are elsewhere."""
        return em.PageAnswer([em.PageModel("served model")])

    async def kill(self, request: em.KillRequest, context: RequestContext) -> em.KillAnswer:
        """Kill an instance as a crash would, to watch it recover."""
        router = self._router
        refuse_kill(router.allow_kill)
        instance = router.admin.named(request.instance or "")
        try:
            await router.admin.command(instance, "/admin/kill", b"{}", context.deadline)
        except HttpProblem as problem:
            # An instance that is killed cannot answer; any other refusal is told.
            if not isinstance(problem.__cause__, ConnectionLostError):
                raise
        return em.KillAnswer(instance.name)


def _state(instance: InstanceState, now: float) -> str:
    if not instance.ready:
        return "down"
    if instance.out:
        return "draining"
    return "ready" if instance.breaker.allows(now) else "ejected"


def _tier(stats: dict[str, float], name: str) -> em.CacheTier:
    used, budget, entries, pinned = (
        int(stats.get(f"{name}_{figure}", 0))
        for figure in ("bytes", "budget_bytes", "entries", "pinned_bytes")
    )
    return em.CacheTier(used, budget, entries, pinned)


def _counts(stats: dict[str, float], start: str) -> dict[str, int]:
    """Return the counters whose names begin so, without that beginning."""
    return {
        name.removeprefix(start): int(count)
        for name, count in stats.items()
        if name.startswith(start) and count
    }
