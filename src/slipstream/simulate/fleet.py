"""A fleet in virtual time: a router's balancer, instances, requests, and what goes wrong.

A request is what a client sends: a pre-inference signal when it arrives, then, after the stages
before ranking, the ranking request with the ticket's owner. The balancer chooses instances, counts
their load and ejects outliers; where an instance refuses or is gone, the next in order is tried, as
`serving/http/router_app.py` does. Touch this when requests travel in another way.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.request_errors import DeadlineError, OverloadError
from slipstream.serving.router.balancer import LoadBalancer
from slipstream.simulate.shared_cores import CallCosts, CoreThread, SharedCores
from slipstream.simulate.simulated_engine import EngineSpec, SimulatedHistory
from slipstream.simulate.simulated_node import SimulatedNode
from slipstream.simulate.traffic import Arrivals, Traffic, Trouble
from slipstream.simulate.virtual_time import VirtualClock, VirtualLoop

PROBE_SECONDS = 0.25  # how often a router asks every instance for its state
SLOW_SECONDS = 0.5  # a deadline this long is the instance's to meet
MAX_TRIES = 3  # instances a request is sent to
Threads = tuple[CoreThread, CoreThread]  # of clients, of the router


class _Lost(Exception):
    """The instance died with the request."""


@dataclass(frozen=True)
class FleetConfig:
    """Instances, their settings, and the time that messages take."""

    instances: int
    spec: EngineSpec
    instance: InstanceConfig
    slo: float = 0.08  # seconds of the ranking stage
    http_seconds: float = 0.003  # of a request on its way there and back
    signals: bool = True  # clients announce their ranking requests
    affinity: bool = True  # users keep their instance
    alone: bool = True  # one router serves all instances, so it remembers where users were
    calls: CallCosts = field(default_factory=CallCosts)


class Fleet:
    """Instances behind one balancer; `latency_R` is inf where a request was not answered."""

    def __init__(self, config: FleetConfig, arrivals: Arrivals, traffic: Traffic, seed: int):
        self.config, self.arrivals, self.traffic = config, arrivals, traffic
        self.loop = VirtualLoop()  # type: ignore[abstract]
        calls = config.calls
        cores = None if calls.cores is None else SharedCores(self.loop, calls.cores)
        self.nodes = [
            SimulatedNode(
                number,
                config.spec,
                config.instance,
                self.loop,
                seed,
                request_seconds=calls.instance_seconds,
                cores=cores,
            )
            for number in range(config.instances)
        ]
        # Client and router, where they share the machine; each half of a call is one way.
        self.threads: Threads | None = None
        if cores is not None:
            self.threads = CoreThread(cores), CoreThread(cores)
        self.by_name = {node.state.name: node for node in self.nodes}
        self.balancer = LoadBalancer(
            [node.state for node in self.nodes],
            affinity=config.affinity,
            alone=config.alone,
            clock=VirtualClock(self.loop),
        )
        self.candidates = range(traffic.candidates)
        count = arrivals.at_R.size
        self.latency_R = np.full(count, np.inf)
        self.counts: Counter[str] = Counter()
        self.rng = np.random.default_rng([seed, 23])
        self._left = count

    # ---- a run -----------------------------------------------------------------------------------

    def run(self, trouble: Trouble) -> None:
        """Serve every arrival."""
        self.loop.call_soon(self._arrive, 0)
        self.loop.call_later(PROBE_SECONDS, self._probe)
        span = float(self.arrivals.at_R[-1])
        for number in range(trouble.deaths):
            node = self.nodes[int(self.rng.integers(len(self.nodes)))]
            when = span * (number + 1) / (trouble.deaths + 1)
            self.loop.call_later(when, self._kill, node, trouble.restart_seconds)
        for node in self.rng.permutation(np.array(self.nodes, dtype=object))[
            : trouble.slow_instances
        ]:
            node.slowness = trouble.slow_factor
        if trouble.rolling_restart:
            self.loop.create_task(self._restart_all(span, trouble.restart_seconds))
        self.loop.run_until_idle()

    def _arrive(self, number: int) -> None:
        """Start one request, and call for the next at its time."""
        self.loop.create_task(self._serve(number))
        if number + 1 < self.arrivals.at_R.size:
            self.loop.call_at(float(self.arrivals.at_R[number + 1]), self._arrive, number + 1)

    async def _serve(self, number: int) -> None:
        """Serve a request; its error ends the run, which would otherwise wait for it for ever."""
        try:
            arrivals = self.arrivals
            user, length = int(arrivals.user_R[number]), int(arrivals.length_R[number])
            name, history = str(user), SimulatedHistory(user, 0, length)
            owner = None
            begin = self.loop.now
            ranking_at = begin + float(arrivals.before_R[number])
            if self.config.signals and self._worth_announcing(length):
                owner = await self._announce(name, history)
            await self.loop.pause(max(0.0, ranking_at - self.loop.now))
            start = ranking_at if self.threads is not None else self.loop.now
            if self.threads is not None:
                await self._client_and_router(self.threads, sends=True)
            answered = await self._rank(name, history, owner, start + self.config.slo)
            if self.threads is not None:
                await self._client_and_router(self.threads, sends=False)
            if answered:
                self.latency_R[number] = self.loop.now - start
            self._left -= 1
        except Exception as error:
            self.loop.errors.append(error)

    def _worth_announcing(self, behaviours: int) -> bool:
        """Return whether a client announces so long a history; one that pays for it asks first."""
        if self.threads is None:
            return True
        return behaviours >= self.nodes[0].instance.estimates.from_behaviours

    async def _client_and_router(self, threads: Threads, sends: bool) -> None:
        """Spend what client and router need for one way of a call, on the cores they share."""
        client, router = threads
        calls = self.config.calls
        ways = ((client, calls.client_seconds), (router, calls.router_seconds))
        for thread, seconds in ways if sends else reversed(ways):
            await thread.work(seconds / 2)

    def _half_call(self, node: SimulatedNode) -> float:
        """Return what an instance's event loop needs for one way of a call."""
        return node.slowness * self.config.calls.instance_seconds / 2

    async def _announce(self, user: str, history: SimulatedHistory) -> str | None:
        """Send the pre-inference signal; return the instance that its ticket names."""
        if self.threads is not None:
            await self._client_and_router(self.threads, sends=True)
        behaviours = len(history)
        state = self.balancer.choose(user, behaviours)
        if state is None:
            return None
        node, half = self.by_name[state.name], self.config.http_seconds / 2
        with self.balancer.outstanding(state, behaviours):
            await self.loop.pause(half)
            if not node.alive:
                self._gone(node)
                return None
            if node.event_loop is not None:
                await node.event_loop.work(self._half_call(node))
            rank_in = self.traffic.before_ms / 1e3
            admission = await node.instance.preinfer(
                user,
                history,  # type: ignore[arg-type]
                rank_in=rank_in,
            )
            state.reported = node.instance.backlog
            if node.event_loop is not None:
                await node.event_loop.work(self._half_call(node))
        self.balancer.note_answer(state)
        self.counts["announced"] += 1
        self.balancer.note_served(user, state, admission.admitted)
        if self.threads is not None:
            await self._client_and_router(self.threads, sends=False)
        return state.name if admission.admitted else None

    async def _rank(
        self, user: str, history: SimulatedHistory, owner: str | None, deadline: float
    ) -> bool:
        """Send the ranking request to one instance after another until one answers."""
        tried: set[str] = set()
        for _ in range(MAX_TRIES):
            left = deadline - self.loop.now
            state = self.balancer.choose(user, len(history), owner=owner, tried=tried)
            if state is None or left <= 0:
                self.counts["no_instance" if state is None else "too_late"] += 1
                return False
            sent = self.loop.now
            try:
                with self.balancer.outstanding(state, len(history)):
                    kept = await self._rank_at(self.by_name[state.name], user, history, deadline)
            except OverloadError as error:
                self.counts[f"refused_{error.reason}"] += 1
                self.balancer.note_answer(state)
            except DeadlineError:
                self.counts["deadline_passed"] += 1
                late = left < SLOW_SECONDS  # as the router takes it: slow, for once
                self.balancer.note_answer(state, failed=not late, seconds=left if late else None)
                return False
            except _Lost:
                self._gone(self.by_name[state.name])
            else:
                self.balancer.note_answer(state, seconds=self.loop.now - sent)
                self.balancer.note_served(user, state, kept)
                return True
            tried.add(state.name)
            self.counts["retries"] += 1
        return False

    async def _rank_at(
        self, node: SimulatedNode, user: str, history: SimulatedHistory, deadline: float
    ) -> bool:
        """Rank at an instance; return whether it keeps a prefix of the user."""
        half, task = self.config.http_seconds / 2, asyncio.current_task()
        assert task is not None
        await self.loop.pause(half)
        if not node.alive:
            raise _Lost
        node.inside.add(task)
        try:
            if node.event_loop is not None:
                await node.event_loop.work(self._half_call(node))
            found = await node.instance.rank(
                user,
                history,  # type: ignore[arg-type]
                self.candidates,
                deadline=deadline,
            )
        except asyncio.CancelledError:
            task.uncancel()
            raise _Lost from None
        finally:
            node.inside.discard(task)
        self.counts[f"hit_{found.hit}"] += 1
        node.state.reported = node.instance.backlog
        if node.event_loop is not None:
            await node.event_loop.work(self._half_call(node))
        await self.loop.pause(half)
        return found.kept

    # ---- what goes wrong -------------------------------------------------------------------------

    def _gone(self, node: SimulatedNode) -> None:
        self.counts["lost"] += 1
        node.state.ready = False  # until a probe finds it again
        self.balancer.note_silence(node.state)

    def _probe(self) -> None:
        """Look at every instance, as a router does."""
        for node in self.nodes:
            state = node.state
            if node.alive:
                if not state.ready:
                    state.reset()
                state.ready, state.reported = True, node.instance.backlog
                state.draining = node.instance.draining
            else:
                state.ready = False
        if self._left:
            self.loop.call_later(PROBE_SECONDS, self._probe)

    def _kill(self, node: SimulatedNode, restart_seconds: float) -> None:
        if node.alive:
            node.die()
            self.counts["deaths"] += 1
            self.loop.call_later(restart_seconds, node.start)

    async def _restart_all(self, span: float, restart_seconds: float) -> None:
        """Drain and restart one instance after the other, over the time of the run."""
        for node in self.nodes:
            await self.loop.pause(max(0.0, span / len(self.nodes) - restart_seconds))
            if not node.alive or not self._left:
                continue
            node.state.draining = True
            await node.instance.drain()
            node.die()
            self.counts["restarts"] += 1
            await self.loop.pause(restart_seconds)
            node.start()
