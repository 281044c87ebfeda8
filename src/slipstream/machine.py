"""What of this machine is free: our cores, our quota, what other processes use of them.

Two decisions follow, both made once at the start of a computation. OpenMP's waiting: its threads
spin while they wait for each other, which is fastest on a quiet machine and ruinous where another
process needs the core; beside busy processes they sleep instead. Threads: where they spin, as many
as find a free core; where they sleep, all, which is faster than fewer.
This module does not import torch, because OpenMP reads its environment when torch loads it. Touch
this when threads or waiting are chosen in another way.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
CGROUPS = Path("/sys/fs/cgroup")
SAMPLE_SECONDS = 0.1
IDLE_COLUMNS = (4, 5)  # of a line of /proc/stat: idle, and waiting for a disk
TIME_COLUMNS = 9  # the last of user … steal; guests are counted in user already
WAIT_POLICY, THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
CHOSEN_BY_USER = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@dataclass(frozen=True)
class MachineLoad:
    """The cores this process may run on, and what other processes use of them."""

    cores: int  # that the scheduler gives us
    quota: float  # cores' worth of time a control group allows; at most `cores`
    others: float  # cores' worth of time that other processes use now
    lasting: float  # the same over the last minute

    @property
    def crowded(self) -> bool:
        """Whether threads on all the cores we may use would wait for other processes."""
        return self.cores - self.others < self.quota - 0.5

    def free_threads(self, most: int) -> int:
        """Return how many threads find a core of their own, at least 1 and at most `most`.

        A load counts where it is there now and was there over the last minute: a run keeps its
        threads to its end, so a short burst at its start must not decide.
        """
        free = self.cores - min(self.others, self.lasting)
        return max(1, min(most, math.ceil(self.quota), round(free)))


def measure_load(seconds: float = SAMPLE_SECONDS) -> MachineLoad:
    """Look at the machine for a moment; where it cannot be read, nobody else uses it."""
    cores = our_cores()
    quota = min(float(len(cores)), read_quota())
    before, own, start = _read_busy(cores), time.process_time(), time.monotonic()
    if before is None:
        return MachineLoad(len(cores), quota, 0.0, 0.0)
    time.sleep(seconds)
    after, passed = _read_busy(cores), time.monotonic() - start
    used = 0.0 if after is None else after - before - (time.process_time() - own)
    others = min(max(used / passed, 0.0), float(len(cores)))
    lasting = os.getloadavg()[0] * len(cores) / (os.cpu_count() or 1)
    return MachineLoad(len(cores), quota, others, lasting)


def our_cores() -> set[int]:
    """Return the numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read_busy(cores: set[int]) -> float | None:
    try:
        return busy_seconds(STAT.read_text(), cores, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return None


def busy_seconds(stat: str, cores: Iterable[int], ticks: int) -> float:
    """Return the CPU seconds that all processes have used on `cores`, from /proc/stat's text."""
    wanted = {f"cpu{core}" for core in cores}
    busy = 0
    for line in stat.splitlines():
        name, *columns = line.split()
        if name in wanted:
            times = [int(column) for column in columns[: TIME_COLUMNS - 1]]
            busy += sum(times) - sum(times[column - 1] for column in IDLE_COLUMNS)
    return busy / ticks


def read_quota(root: Path = CGROUPS) -> float:
    """Return the cores' worth of time that a control group allows; infinity without a limit."""
    try:
        if (root / "cpu.max").exists():  # version 2: "200000 100000" or "max 100000"
            allowed, period = (root / "cpu.max").read_text().split()
        else:
            allowed = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        return math.inf if allowed == "max" or int(allowed) <= 0 else int(allowed) / int(period)
    except (OSError, ValueError):
        return math.inf


def wait_passively_where_crowded(
    environment: MutableMapping[str, str] = os.environ, load: MachineLoad | None = None
) -> bool:
    """Let OpenMP's threads sleep while they wait, if other processes need the cores.

    It does nothing where torch is loaded already, where the user has chosen, or under torchrun,
    whose ranks would take each other for strangers. Return whether it was set.
    """
    if "torch" in sys.modules or any(name in environment for name in CHOSEN_BY_USER):
        return False
    if ranks_here(environment) > 1 or not (load or measure_load()).crowded:
        return False
    environment[WAIT_POLICY] = "passive"
    return True


def ranks_here(environment: MutableMapping[str, str] = os.environ) -> int:
    """Return how many ranks torchrun has started on this machine."""
    count = environment.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdigit() else 1


def choose_threads(
    most: int,
    environment: MutableMapping[str, str] = os.environ,
    load: MachineLoad | None = None,
) -> tuple[int, str]:
    """Choose how many threads compute, and say why where it is not `most`, torch's own choice.

    Ranks share the cores. torchrun gives each one thread unless OMP_NUM_THREADS was set, which
    leaves cores idle where there are more of them than ranks. Threads that sleep while they wait
    need no core of their own.
    """
    ranks = ranks_here(environment)
    if ranks > 1:
        if "TORCHELASTIC_RUN_ID" not in environment or environment.get(THREADS) != "1":
            return most, ""
        cores = min(len(our_cores()), math.ceil(min(read_quota(), 1e6)))
        count = max(1, cores // ranks)
        why = f"{count} threads on each of {ranks} ranks: {cores} cores, torchrun had set 1"
        return count, why if count != most else ""
    if THREADS in environment or most == 1:
        return most, ""
    load = load or measure_load()
    sleeping = environment.get(WAIT_POLICY, "").lower() == "passive"
    count = min(most, math.ceil(load.quota)) if sleeping else load.free_threads(most)
    if count == most:
        return most, ""
    why = f"{count} of {most} threads: other processes use {load.others:.1f} of {load.cores} cores"
    if load.quota < most:
        why = f"{count} of {most} threads: this container may use {load.quota:g} cores"
    return count, why
