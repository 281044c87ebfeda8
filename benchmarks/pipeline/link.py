"""Links between the ranks of the pipeline benchmark: network namespaces, or an emulated link.

With root on Linux namespaces are joined by cables (veth) whose ends pass a token bucket (`tc …
tbf`): waiting there costs no processor time, as on a real network. Elsewhere every message is
followed by a pause as long as it would take; the report names which. Touch this when a link needs
another limit.
"""

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slipstream.interrupts import terminated_as_interrupted
from slipstream.pipeline.lane_groups import LaneGroups


def can_make_namespaces() -> bool:
    """Check whether this process may build network namespaces with token buckets."""
    if (
        os.name != "posix"
        or not hasattr(os, "geteuid")
        or os.geteuid() != 0
        or not (shutil.which("ip") and shutil.which("tc"))
    ):
        return False
    with contextlib.suppress(RuntimeError), joined_namespaces() as link:
        link.set_rate(1e8)
        return True
    return False


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def burst_bytes(bytes_per_second: float) -> int:
    """Return what an idle card sends at once: about two milliseconds, and a few packets."""
    return max(16_000, int(bytes_per_second / 500))


class Namespaces:
    """Joined namespaces; their names hold the process id, so benchmarks do not clash.

    Two are joined by one cable, more by a switch: a bridge in a namespace of its own.
    """

    kind = "network namespaces"

    def __init__(self, ends: int = 2) -> None:
        self.names = [f"slip{os.getpid()}n{end}" for end in range(ends)]
        self.cards = [f"slip{os.getpid() % 100000}v{end}" for end in range(ends)]
        self._switch = f"slip{os.getpid()}n{ends}"

    def build(self) -> None:
        for name in self.names:
            _call("ip", "netns", "add", name)
        if len(self.names) == 2:
            _call("ip", "link", "add", self.cards[0], "type", "veth", "peer", "name", self.cards[1])
        else:
            self._build_switch()
        for end, (name, card) in enumerate(zip(self.names, self.cards, strict=True)):
            _call("ip", "link", "set", card, "netns", name)
            _call("ip", "-n", name, "addr", "add", f"10.231.7.{end + 1}/24", "dev", card)
            _call("ip", "-n", name, "link", "set", card, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")

    def _build_switch(self) -> None:
        """Make a cable for every end and plug them into one bridge."""
        switch = self._switch
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge0", "up")
        for card in self.cards:
            port = f"{card}p"
            _call("ip", "link", "add", card, "type", "veth", "peer", "name", port)
            _call("ip", "link", "set", port, "netns", switch)
            _call("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            _call("ip", "-n", switch, "link", "set", port, "up")

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Limit both directions; None means as fast as the machine copies."""
        for name, card in zip(self.names, self.cards, strict=True):
            if bytes_per_second is None:
                subprocess.run(
                    ["tc", "-n", name, "qdisc", "del", "dev", card, "root"],
                    capture_output=True,
                    timeout=20,
                )
                continue
            bits = max(int(8 * bytes_per_second), 80_000)
            burst = str(burst_bytes(bytes_per_second))
            shape = ["tbf", "rate", f"{bits}bit", "burst", burst, "limit", str(8 << 20)]
            _call("tc", "-n", name, "qdisc", "replace", "dev", card, "root", *shape)

    def command(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[rank]]

    def environment(self, rank: int) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.cards[rank]}

    def remove(self) -> None:
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@contextlib.contextmanager
def joined_namespaces(ends: int = 2) -> Iterator[Namespaces]:
    """Build namespaces and remove them in any case; those of a killed benchmark go first."""
    _sweep()
    link = Namespaces(ends)
    with terminated_as_interrupted():
        try:
            link.build()
            yield link
        finally:
            link.remove()


def _sweep() -> None:
    """Remove namespaces whose process has ended, which only a later run can do after SIGKILL."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=20
    ).stdout
    for name, process in re.findall(r"^(slip(\d+)n\d+)\b", listed, re.MULTILINE):
        if not Path("/proc", process).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


class EmulatedLink:
    """One direction of a cable in this process: each message takes the time of its bytes."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free, self._lock = bytes_per_second, 0.0, threading.Lock()

    def carry(self, size: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))

    def slow_down(self, groups: LaneGroups) -> None:
        """Let every message of a schedule's lanes pass through this link."""
        for communicators in groups.communicators.values():
            for wire in communicators:
                self._wrap(wire)

    def _wrap(self, wire: Any) -> None:
        swap, sum_, rank = wire.swap, wire.sum_, wire.rank

        def slow_swap(
            sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], purpose: str
        ) -> torch.Tensor:
            received = swap(sent, send_sizes, receive_sizes, purpose)
            self.carry((sum(send_sizes) - send_sizes[rank]) * sent.element_size())
            return received

        def slow_sum(values: torch.Tensor) -> torch.Tensor:
            summed = sum_(values)
            self.carry(values.numel() * values.element_size())
            return summed

        wire.swap, wire.sum_ = slow_swap, slow_sum
