"""Servers of the serving benchmark: the flags of each variant, and who uses the cores.

Touch this when a variant is started in another way.
"""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.served import ServedProcess, served_process
from benchmarks.serving.users import Population

ROLES = ("generator", "router", "instances", "others", "stolen")  # who may use the cores
IDLE_SECONDS = 20.0  # longest wait for a start to be over
FIRST_REQUESTS = 8  # to a server that has just started, by the last users of its population


@dataclass(frozen=True)
class Variant:
    """A way to serve: its flags, and what the benchmark must know of it."""

    name: str
    flags: tuple[str, ...] = ()
    instances: int = 2
    preinfer: bool = False  # rankings are announced
    keeps: bool = False  # prefixes outlive a request
    truncated: bool = False  # served from the bundle of short histories


RELAY = Variant("relay", preinfer=True, keeps=True)
VARIANTS = {
    variant.name: variant
    for variant in (
        RELAY,
        Variant("W1", ("--no-relay",)),
        Variant("W2", ("--no-relay", "--threads", "2"), instances=1),
        Variant("W3", ("--no-preinfer",), keeps=True),
        Variant("W4", ("--no-relay",), truncated=True),
    )
}


@dataclass(eq=False)
class Running:
    """A server, and the first user it has not seen."""

    server: ServedProcess
    ending: contextlib.ExitStack
    next_user: int = 0


class Deployment:
    """The servers of one population, a variant each, side by side: only one is asked at a time."""

    def __init__(self, work: Path, bundles: dict[bool, Path], memory: tuple[str, ...]) -> None:
        self.work, self.bundles, self.memory = work, bundles, memory
        self._population: Population | None = None
        self._running: dict[tuple[object, ...], Running] = {}
        self._last: Running | None = None  # that was asked
        self.started = 0  # servers so far

    def users(
        self, variant: Variant, population: Population, count: int, flags: tuple[str, ...] = ()
    ) -> tuple[ServedProcess, int]:
        """Return a server of this variant and the first of `count` users it has not seen.

        What the server that was asked last still does, such as copies, is done by then.
        """
        assert count <= population.users, f"{count} users of {population.users} are needed"
        if population != self._population:
            self.close()
            self._population = population
        key, most = (variant, flags), population.users
        if count + FIRST_REQUESTS <= most:
            most -= FIRST_REQUESTS
        running = self._running.get(key)
        if running is not None and running.next_user + count > most:
            self._end(key)
            running = None
        if self._last is not None and self._last is not running:
            wait_until_idle(self._last.server)
        if running is None:
            running = self._running[key] = self._start(variant, population, flags)
        self._last = running
        first, running.next_user = running.next_user, running.next_user + count
        return running.server, first

    def _start(self, variant: Variant, population: Population, flags: tuple[str, ...]) -> Running:
        self.started += 1
        stored = population.write_store(self.work / "stores")
        folder = self.work / f"server-{self.started}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        history = folder / "served.db"
        shutil.copyfile(stored, history)
        options = [
            *("--instances", str(variant.instances), "--history", f"sqlite:{history.absolute()}"),
            *("--state", str((folder / "state").absolute())),
            *(self.memory if variant.keeps else ()),
            *variant.flags,
            *flags,
        ]
        bundle = self.bundles[variant.truncated].absolute()
        ending = contextlib.ExitStack()
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        server = ending.enter_context(
            served_process(bundle, *options, processes=variant.instances + 1)
        )
        wait_until_idle(server)
        return Running(server, ending)

    def _end(self, key: tuple[object, ...]) -> None:
        running = self._running.pop(key)
        if self._last is running:
            self._last = None
        running.ending.close()

    def close(self) -> None:
        """End the servers."""
        for key in list(self._running):
            self._end(key)
        self._population = None


def wait_until_idle(server: ServedProcess) -> None:
    """Wait until a server that has just started is done with it, its spare process included."""
    end = time.monotonic() + IDLE_SECONDS
    quiet = 0
    while quiet < 3 and time.monotonic() < end:
        cores = CoreShares(server)
        time.sleep(0.4)
        shares = cores.shares()
        quiet = quiet + 1 if shares["instances"] + shares["router"] < 0.05 else 0


class CoreShares:
    """The processor time of generator, router, instances and others between two moments.

    `stolen` is what a hypervisor gave to other machines; it counts among the others, too.
    """

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._begin, self._before = time.monotonic(), self._seconds()

    def shares(self) -> dict[str, float]:
        """Return each one's share of all cores since the start."""
        wall = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        after = self._seconds()
        spent = {role: max(0.0, after[role] - self._before.get(role, 0.0)) for role in after}
        ours = sum(spent[role] for role in ("generator", "router", "instances"))
        spent["others"] = max(0.0, spent.pop("machine") - ours)
        return {role: seconds / wall for role, seconds in spent.items()}

    def _seconds(self) -> dict[str, float]:
        tick = os.sysconf("SC_CLK_TCK")
        columns = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        busy = sum(columns) - columns[3] - columns[4]  # without idle and waiting for disks
        found = {"generator": sum(os.times()[:2]), "router": 0.0, "instances": 0.0}
        found["machine"], found["stolen"] = busy / tick, columns[7] / tick
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) != self._server.pid:
                    continue
                command = (stat.parent / "cmdline").read_text()
                role = "router" if "router_process" in command else "instances"
                found[role] += (int(fields[11]) + int(fields[12])) / tick
        return found
