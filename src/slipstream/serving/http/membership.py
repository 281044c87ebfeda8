"""Which instances a router has: its own, and peers that come and go while it runs.

A thread reads the sources (router/peers.py), so that neither a slow disk nor a slow name server
delays a request. A peer that is new is probed and then takes its users. One that is off the list
gets nothing new, finishes what it has, and is dropped with everything kept about it. The last good
list is kept in a file, for a router that starts again while the list is damaged. Touch this when
instances join or leave in another way.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.serving.router.balancer import InstanceState
from slipstream.serving.router.peers import (
    LOOKUP_SECONDS,
    InstanceAddress,
    PeersError,
    PeersFile,
    PeersName,
    check_peers,
)

if TYPE_CHECKING:
    from slipstream.serving.http.router_app import Router

LOOK_SECONDS = 0.25  # between two looks at the sources
log = logging.getLogger("slipstream.serving")


class PeerReader:
    """The lists of several sources as one; what cannot be read is logged, its last list kept."""

    def __init__(self, sources: Sequence[PeersFile | PeersName], kept: Path | None = None) -> None:
        """`kept` is the file of the last good list."""
        self._sources, self._kept = sources, kept
        self._lists: dict[str, list[InstanceAddress]] = {}
        self._faults: dict[str, str] = {}
        if kept is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                kind = dict[str, list[InstanceAddress]]
                self._lists = msgspec.json.decode(kept.read_bytes(), type=kind)
        self._written = dict(self._lists)

    def read(self) -> list[InstanceAddress]:
        """Return the instances of all sources."""
        for source in self._sources:
            try:
                self._lists[source.source] = source.read()
                self._note(source.source, "")
            except PeersError as error:
                self._note(source.source, str(error))
        self._lists = {each.source: self._lists.get(each.source, []) for each in self._sources}
        merged = merge_peers(self._lists.values())
        try:
            check_peers(merged, "the list of all peers")
        except PeersError as error:
            self._note("the list of all peers", str(error))
            return merge_peers(self._written.values())
        self._note("the list of all peers", "")
        self._keep()
        return merged

    def _note(self, source: str, fault: str) -> None:
        """Log a fault once, and its end."""
        before = self._faults.get(source, "")
        if fault and fault != before:
            log.warning("%s; the last good list stays in use", fault)
        elif before and not fault:
            log.info("%s is read again", source)
        self._faults[source] = fault

    def _keep(self) -> None:
        if self._lists == self._written:
            return
        self._written = dict(self._lists)
        if self._kept is not None:
            beside = self._kept.with_name(f"{self._kept.name}-{threading.get_native_id()}")
            try:
                beside.write_bytes(msgspec.json.encode(self._written))
                beside.replace(self._kept)
            except OSError as error:
                log.warning("the list of peers is not kept: %s", error)


def merge_peers(lists: Iterable[list[InstanceAddress]]) -> list[InstanceAddress]:
    """Return the instances of several lists; of two with one name or address, the first."""
    merged: dict[str, InstanceAddress] = {}
    urls: set[str] = set()
    for peer in (peer for peers in lists for peer in peers):
        if peer.name not in merged and peer.url not in urls:
            merged[peer.name] = peer
            urls.add(peer.url)
    return list(merged.values())


class Membership:
    """Keeps the peers of a router as the sources list them."""

    def __init__(
        self, router: "Router", reader: PeerReader, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._router, self._reader, self._look_seconds = router, reader, look_seconds
        self._peers: dict[str, InstanceState] = {}
        self._ended = threading.Event()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Take the listed instances, and follow the lists until the block ends."""
        loop, first = asyncio.get_running_loop(), asyncio.Event()

        def apply(wanted: list[InstanceAddress]) -> None:
            if not self._ended.is_set():
                self.apply(wanted)
            first.set()

        def follow() -> None:
            while not self._ended.is_set():
                wanted = self._reader.read()
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(apply, wanted)
                self._ended.wait(self._look_seconds)

        threading.Thread(target=follow, name="peers", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first.wait(), 2 * LOOKUP_SECONDS)
        await self._router.probes.probe_all()
        try:
            yield
        finally:
            self._ended.set()

    def apply(self, wanted: Sequence[InstanceAddress]) -> None:
        """Let the router have these peers; those that leave go when they have nothing left.

        A peer with the name of an own instance is that instance. One that changed its address
        leaves, and comes back at the new one.
        """
        listed, router = {peer.name: peer for peer in wanted}, self._router
        for name, instance in list(self._peers.items()):
            peer = listed.get(name)
            if peer is not None and (peer.url, peer.pool) == (instance.url, instance.pool):
                if instance.leaving:
                    router.take_back(instance)
                    log.info("instance %s is listed again", name)
                continue
            if not instance.leaving:
                log.info("instance %s at %s leaves: it is listed no more", name, instance.url)
                router.leave(instance)
            if router.drop_if_idle(instance):
                del self._peers[name]
                log.info("instance %s has left", name)
        for name, peer in listed.items():
            if name not in router.balancer.by_name:
                self._peers[name] = InstanceState(name, peer.url, peer.pool, ready=False)
                router.add(self._peers[name])
                log.info("instance %s at %s joins", name, peer.url)
