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


class Deployment:
    """One running server, replaced where another variant, other users or fresh users are needed."""

    def __init__(self, work: Path, bundles: dict[bool, Path], memory: tuple[str, ...]) -> None:
        self.work, self.bundles, self.memory = work, bundles, memory
        self.server: ServedProcess | None = None
        self._running = contextlib.ExitStack()
        self._key: tuple[object, ...] = ()
        self._next_user = 0
        self.started = 0  # servers so far

    def users(
        self, variant: Variant, population: Population, count: int, flags: tuple[str, ...] = ()
    ) -> tuple[ServedProcess, int]:
        """Return a server of this variant and the first of `count` users it has not seen."""
        key, most = (variant, population, flags), population.users
        if count + FIRST_REQUESTS <= most:
            most -= FIRST_REQUESTS
        if self.server is None or key != self._key or self._next_user + count > most:
            self.close()
            self.started += 1
            self.server = self._start(variant, population, flags)
            self._key, self._next_user = key, 0
        assert count <= population.users, f"{count} users of {population.users} are needed"
        first, self._next_user = self._next_user, self._next_user + count
        return self.server, first

    def _start(
        self, variant: Variant, population: Population, flags: tuple[str, ...]
    ) -> ServedProcess:
        stored = population.write_store(self.work / "stores")
        for left in self.work.glob("served.db*"):
            left.unlink()
        history = self.work / "served.db"
        shutil.copyfile(stored, history)
        options = [
            *("--instances", str(variant.instances), "--history", f"sqlite:{history.absolute()}"),
            *("--state", str((self.work / "state").absolute())),
            *(self.memory if variant.keeps else ()),
            *variant.flags,
            *flags,
        ]
        bundle = self.bundles[variant.truncated].absolute()
        server = self._running.enter_context(
            served_process(bundle, *options, processes=variant.instances + 1)
        )
        wait_until_idle(server)
        return server

    def close(self) -> None:
        """End the server."""
        self.server = None
        self._running.close()


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
