"""A router's probes: each instance is asked for its status, again and again.

A probe says whether an instance is ready, draining or loaded, which version it serves, and by which
name it signs tickets. Touch this when a router should learn something else of an instance.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import msgspec

from slipstream.serving.http import messages as m
from slipstream.serving.router.balancer import InstanceState, LoadBalancer
from slipstream.serving.router.upstream import (
    ConnectError,
    ConnectionLostError,
    Upstream,
    UpstreamError,
)

MAX_MISSED_PROBES = 3  # in a row; then an instance counts as not ready
log = logging.getLogger("slipstream.serving")


class InstanceProbes:
    """Probes the instances of a load balancer and keeps what they answered last."""

    def __init__(
        self,
        balancer: LoadBalancer,
        upstreams: Mapping[str, Upstream],
        common: bytes,
        seconds: float,
        timeout: float,
    ) -> None:
        """`common` is the part that all requests to instances share; a probe every `seconds`."""
        self._balancer, self._upstreams = balancer, upstreams
        self._request = b"GET /v1/status" + common + b"content-length: 0\r\n\r\n"
        self._seconds, self._timeout = seconds, timeout
        self.statuses: dict[str, m.StatusAnswer] = {}  # of each instance, as last probed
        self._missed: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._own_names: dict[str, str] = {}  # of instances that sign tickets by another name
        self._told: set[tuple[str, str]] = set()  # what was logged about an instance

    async def probe(self, instance: InstanceState) -> None:
        """Ask an instance for its status and keep the answer."""
        name = instance.name
        try:
            answer = await self._upstreams[name].request(self._request, self._timeout)
            self._tell(
                answer.status == 401,
                name,
                "instance %s refuses the key of this router; is it of the same cluster?",
            )
            if answer.status != 200:
                raise ConnectionLostError
            status = msgspec.json.decode(answer.body, type=m.StatusAnswer)
        except (UpstreamError, TimeoutError, msgspec.DecodeError) as error:
            self._missed[name] += 1
            if isinstance(error, ConnectError) or self._missed[name] >= MAX_MISSED_PROBES:
                instance.ready = False
            return
        self._missed[name] = 0
        if not instance.ready:
            instance.reset()  # a new process: the old one's failures do not count
        instance.ready = status.ready or status.draining
        instance.draining, instance.reported = status.draining, status.backlog
        self.statuses[name] = status
        self._note_own_name(name, status.instance)

    async def probe_all(self) -> None:
        """Probe every instance once."""
        await asyncio.gather(*map(self.probe, self._balancer.instances))

    def start(self, instance: InstanceState) -> None:
        """Probe an instance from now on, again and again."""
        self._tasks[instance.name] = asyncio.create_task(self._probe_forever(instance))

    def stop(self, instance: InstanceState) -> None:
        """Probe an instance no more."""
        self._tasks.pop(instance.name).cancel()

    async def stop_all(self) -> None:
        """Probe nobody any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, name: str) -> None:
        """Keep nothing about an instance that has left."""
        self.statuses.pop(name, None)
        del self._missed[name]
        self._own_names = {own: each for own, each in self._own_names.items() if each != name}
        self._told = {told for told in self._told if told[0] != name}

    def owner(self, name: str) -> str:
        """Return the router's name of the instance that a ticket names."""
        return name if name in self._balancer.by_name else self._own_names.get(name, name)

    async def _probe_forever(self, instance: InstanceState) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            await self.probe(instance)

    def _note_own_name(self, name: str, own: str) -> None:
        """Note by which name an instance signs tickets, where a list gives it another one."""
        if own == name:
            return
        other = self.owner(own)
        alike = other != name and other in self._balancer.by_name
        self._tell(
            alike, name, f"instances %s and {other} are both called {own}; use another --machine"
        )
        if not alike:
            self._own_names[own] = name

    def _tell(self, true: bool, name: str, sentence: str) -> None:
        """Log a sentence about an instance once, until it is true no more."""
        if true and (name, sentence) not in self._told:
            log.warning(sentence, name)
        (self._told.add if true else self._told.discard)((name, sentence))
