"""`slipstream serve`: starts the instances and the routers, starts again what dies, and ends them
in order.

The supervisor holds the public socket; routers inherit it, so while a router is started again new
connections wait instead of failing. Instances listen on loopback ports of their own. Children
notice the supervisor's death by the end of their stdin. On the way out routers go first (they
finish what they have, which needs the instances), then the instances.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.serving.http.process import (
    INSTANCE_KEY_VARIABLE,
    KEYS_VARIABLE,
    SECRET_VARIABLE,
    listening_socket,
)

TICK_SECONDS = 0.05
QUICK_DEATH_SECONDS = 5.0
MAX_QUICK_DEATHS = 5  # in a row, before it ever was ready: then the fault is not chance
MAX_BACKOFF_SECONDS = 5.0
SPARE_DELAY_SECONDS = 1.5
START_SECONDS = 120.0


@dataclass
class Child:
    """A process to keep alive: how to start it, and how its last starts went."""

    name: str
    command: list[str]
    url: str
    inherited: tuple[int, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    start_again_at: float = 0.0
    quick_deaths: int = 0
    restarts: int = 0
    was_ready: bool = False

    @property
    def settings(self) -> str:
        return self.command[-1]


@dataclass(frozen=True)
class Plan:
    """What to run. `instance_command` and `router_command` are the words before the settings."""

    instances: int
    instance_settings: dict[str, Any]
    routers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    router_settings: dict[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    drain_seconds: float = 10.0
    linger: float = 0.6
    spare: bool = (
        True  # one more process with its imports done, to take the place of an instance that dies
    )
    instance_command: tuple[str, ...] = (
        sys.executable,
        "-m",
        "slipstream.serving.http.instance_process",
    )
    router_command: tuple[str, ...] = (
        sys.executable,
        "-m",
        "slipstream.serving.http.router_process",
    )


class Supervisor:
    """Runs a plan until told to stop. `say` is told, in a sentence, everything that happens."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan, self._say = plan, say
        self._stop = False
        self.all_ready = False
        try:
            self._socket = listening_socket(plan.host, plan.port)
        except OSError as error:
            raise SlipstreamError(
                f"cannot listen on {plan.host}:{plan.port} ({error.strerror}); choose another "
                "--port"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{plan.host}:{self.port}"
        self._environment = {
            **os.environ,
            SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32),
            KEYS_VARIABLE: ",".join(plan.api_keys),
            INSTANCE_KEY_VARIABLE: secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self._shelf = make_shelf()
        self.instances = [
            self._instance(number, port) for number, port in enumerate(_free_ports(plan.instances))
        ]
        self._spare: subprocess.Popen[bytes] | None = None
        self.routers = [self._router(number) for number in range(plan.routers)]

    # What to start

    def _instance(self, number: int, port: int) -> Child:
        name = f"i-{number}"
        settings = {
            **self.plan.instance_settings,
            "name": name,
            "shelf": str(self._shelf),
            "port": port,
            "linger": self.plan.linger,
            "drain_seconds": self.plan.drain_seconds,
            "watch_parent": True,
        }
        return Child(
            name, [*self.plan.instance_command, _json(settings)], f"http://127.0.0.1:{port}"
        )

    def _router(self, number: int) -> Child:
        pools = self.plan.pools or ("any",) * len(self.instances)
        settings = {
            **self.plan.router_settings,
            "socket_fd": self._socket.fileno(),
            "drain_seconds": self.plan.drain_seconds,
            "watch_parent": True,
            "members": [
                {"name": child.name, "url": child.url, "pool": pool}
                for child, pool in zip(self.instances, pools, strict=True)
            ],
        }
        return Child(
            f"router-{number}",
            [*self.plan.router_command, _json(settings)],
            self.url,
            (self._socket.fileno(),),
        )

    # Running

    def run(self) -> None:
        """Start everything and watch it; returns after `stop` when all have left."""
        children = [*self.instances, *self.routers]
        try:
            for child in children:
                self._start(child)
            self._await_ready()
            self.all_ready = not self._stop
            while not self._stop:
                for child in children:
                    self._look_after(child)
                self._look_after_spare()
                time.sleep(TICK_SECONDS)
        finally:
            self._end_spare()
            self._end(self.routers)
            self._end(self.instances)
            self._socket.close()
            shutil.rmtree(self._shelf, ignore_errors=True)

    def stop(self, *_signal: object) -> None:
        """Ask `run` to end; safe in a signal handler."""
        self._stop = True

    def _start(self, child: Child) -> None:
        spare, self._spare = (self._spare, None) if child in self.instances else (None, self._spare)
        if spare is not None and spare.poll() is None:
            assert spare.stdin is not None
            with contextlib.suppress(
                OSError
            ):  # one that dies in this moment is noticed like any other
                spare.stdin.write(child.settings.encode() + b"\n")
                spare.stdin.flush()
            child.process = spare
        else:
            child.process = self._open(child.command, child.inherited)
        child.started_at = time.monotonic()

    def _open(
        self, command: list[str], inherited: tuple[int, ...] = ()
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=self._environment,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to handle
        )

    def _look_after_spare(self) -> None:
        """Keep one spare, but let a fresh instance come up first."""
        if not self.plan.spare or (self._spare is not None and self._spare.poll() is None):
            return
        if (
            time.monotonic() - max(child.started_at for child in self.instances)
            > SPARE_DELAY_SECONDS
        ):
            self._spare = self._open([*self.plan.instance_command, "-"])

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
            if self._spare.stdin is not None:
                with contextlib.suppress(OSError):
                    self._spare.stdin.close()

    def _look_after(self, child: Child) -> None:
        """Start again what has died, at once the first time, later and later when it keeps dying
        young.
        """
        now = time.monotonic()
        if child.process is None:
            if now >= child.start_again_at:
                self._start(child)
            return
        code = child.process.poll()
        if code is None:
            if now - child.started_at > QUICK_DEATH_SECONDS:
                child.quick_deaths, child.was_ready = 0, True
            return
        _close_stdin(child)
        child.process = None
        child.restarts += 1
        child.quick_deaths += 1 if now - child.started_at < QUICK_DEATH_SECONDS else 0
        if child.quick_deaths >= MAX_QUICK_DEATHS and not child.was_ready:
            raise SlipstreamError(
                f"{child.name} ended {child.quick_deaths} times right after its start (code "
                f"{code}); see above"
            )
        delay = (
            0.0 if child.quick_deaths < 2 else min(MAX_BACKOFF_SECONDS, 0.1 * 2**child.quick_deaths)
        )
        child.start_again_at = now + delay
        self._say(f"{child.name} ended ({_ending(code)}); starting it again")
        if not delay:
            self._start(child)

    def _await_ready(self) -> None:
        """Wait until every instance answers, looking after those that die meanwhile."""
        end, waiting = time.monotonic() + START_SECONDS, [*self.instances, *self.routers]
        while waiting and not self._stop:
            if time.monotonic() > end:
                raise SlipstreamError(
                    f"{waiting[0].name} was not ready within {START_SECONDS:.0f} s; is the bundle "
                    "too large?"
                )
            for child in [*self.instances, *self.routers]:
                self._look_after(child)
            for child in [child for child in waiting if is_ready(child.url)]:
                child.was_ready = True
                waiting.remove(child)
                self._say(f"{child.name} is ready")
            time.sleep(TICK_SECONDS)

    def _end(self, children: list[Child]) -> None:
        """SIGTERM to all, wait for their drain, SIGKILL to what stays."""
        running = [
            child
            for child in children
            if child.process is not None and child.process.poll() is None
        ]
        for child in running:
            assert child.process is not None
            child.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.plan.drain_seconds + self.plan.linger + 5.0
        for child in running:
            assert child.process is not None
            try:
                child.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._say(f"{child.name} did not finish in time and is ended")
                child.process.kill()
                child.process.wait()
        for child in children:
            _close_stdin(child)


def make_shelf() -> Path:
    """A private directory in shared memory for what outlives an instance; those of supervisors that
    were killed are removed.
    """
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    start = f"slipstream-{os.getuid()}-"
    for left in place.glob(f"{start}*"):
        owner = left.name.removeprefix(start).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{start}{os.getpid()}-", dir=place))


def _close_stdin(child: Child) -> None:
    if child.process is not None and child.process.stdin is not None:
        child.process.stdin.close()


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _json(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def is_ready(url: str) -> bool:
    """Does the process at `url` say that it may be sent requests?"""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
