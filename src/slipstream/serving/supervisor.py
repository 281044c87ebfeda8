"""The supervisor of `slipstream serve`: starts instances and routers, restarts those that die.

The supervisor holds the public socket and the routers inherit it: while a router restarts, new
connections wait instead of failing. Instances listen on loopback ports of their own. Children
notice the supervisor's death by the end of their stdin. At the end routers stop first, because
their last requests need the instances, then the instances. Touch this when processes are started,
restarted or ended in another way.
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
    CANNOT_START,
    INSTANCE_KEY_VARIABLE,
    KEYS_VARIABLE,
    SECRET_VARIABLE,
    listening_socket,
)

TICK_SECONDS = 0.05
QUICK_DEATH_SECONDS = 5.0
MAX_QUICK_DEATHS = 5  # in a row, before it ever was ready: then restarting does not help
MAX_BACKOFF_SECONDS = 5.0
SPARE_DELAY_SECONDS = 1.5
START_SECONDS = 120.0


@dataclass
class Child:
    """A process to keep alive: its command, and how its last starts went."""

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
        """Its settings, as JSON."""
        return self.command[-1]


@dataclass(frozen=True)
class DeploymentConfig:
    """The instances and routers to run; a command's last argument, its settings, is added."""

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
    spare: bool = True  # keep a process with its imports done, to replace an instance that dies
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
    """Runs a deployment until `stop`. `log` gets a sentence for everything that happens."""

    def __init__(self, config: DeploymentConfig, log: Callable[[str], None]) -> None:
        self.config, self._log = config, log
        self._stop = False
        self.all_ready = False
        try:
            self._socket = listening_socket(config.host, config.port)
        except OSError as error:
            raise SlipstreamError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another "
                "--port"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{config.host}:{self.port}"
        self._environment = {
            **os.environ,
            SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32),
            KEYS_VARIABLE: ",".join(config.api_keys),
            INSTANCE_KEY_VARIABLE: secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self._shelf = make_shelf()
        self.instances = [
            self._instance(number, port)
            for number, port in enumerate(_free_ports(config.instances))
        ]
        self._spare: subprocess.Popen[bytes] | None = None
        self.routers = [self._router(number) for number in range(config.routers)]

    # What to start

    def _instance(self, number: int, port: int) -> Child:
        name = f"i-{number}"
        settings = {
            **self.config.instance_settings,
            "name": name,
            "shelf": str(self._shelf),
            "port": port,
            "linger": self.config.linger,
            "drain_seconds": self.config.drain_seconds,
            "watch_parent": True,
        }
        return Child(
            name, [*self.config.instance_command, _json(settings)], f"http://127.0.0.1:{port}"
        )

    def _router(self, number: int) -> Child:
        pools = self.config.pools or ("any",) * len(self.instances)
        settings = {
            **self.config.router_settings,
            "socket_fd": self._socket.fileno(),
            "drain_seconds": self.config.drain_seconds,
            "watch_parent": True,
            "instances": [
                {"name": child.name, "url": child.url, "pool": pool}
                for child, pool in zip(self.instances, pools, strict=True)
            ],
        }
        return Child(
            f"router-{number}",
            [*self.config.router_command, _json(settings)],
            self.url,
            (self._socket.fileno(),),
        )

    # Running

    def run(self) -> None:
        """Start all processes and watch them; return after `stop`, when all have ended."""
        children = [*self.instances, *self.routers]
        try:
            for child in children:
                self._start(child)
            self._await_ready()
            self.all_ready = not self._stop
            while not self._stop:
                for child in children:
                    self._restart_if_dead(child)
                self._keep_spare()
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
            with contextlib.suppress(OSError):  # it may die just now: noticed like any other death
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

    def _keep_spare(self) -> None:
        """Start a spare process where none runs, once the youngest instance has had its start."""
        if not self.config.spare or (self._spare is not None and self._spare.poll() is None):
            return
        youngest = max(child.started_at for child in self.instances)
        if time.monotonic() - youngest > SPARE_DELAY_SECONDS:
            self._spare = self._open([*self.config.instance_command, "-"])

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
            if self._spare.stdin is not None:
                with contextlib.suppress(OSError):
                    self._spare.stdin.close()

    def _restart_if_dead(self, child: Child) -> None:
        """Restart a dead child: at once the first time, later when it keeps dying young."""
        now = time.monotonic()
        if child.process is None:
            if now >= child.start_again_at:
                self._start(child)
            return
        code = child.process.poll()
        if code is None:
            if now - child.started_at > QUICK_DEATH_SECONDS:
                child.quick_deaths = 0
            return
        _close_stdin(child)
        child.process = None
        child.restarts += 1
        if code == CANNOT_START and not child.was_ready:
            raise SlipstreamError(f"{child.name} cannot start; the error above says why")
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
        self._log(f"{child.name} ended ({_describe_exit(code)}); starting it again")
        if not delay:
            self._start(child)

    def _await_ready(self) -> None:
        """Wait until every child is ready; restart those that die meanwhile."""
        end, waiting = time.monotonic() + START_SECONDS, [*self.instances, *self.routers]
        while waiting and not self._stop:
            if time.monotonic() > end:
                raise SlipstreamError(
                    f"{waiting[0].name} was not ready within {START_SECONDS:.0f} s; is the bundle "
                    "too large?"
                )
            for child in [*self.instances, *self.routers]:
                self._restart_if_dead(child)
            for child in [child for child in waiting if is_ready(child.url)]:
                child.was_ready = True
                waiting.remove(child)
                self._log(f"{child.name} is ready")
            time.sleep(TICK_SECONDS)

    def _end(self, children: list[Child]) -> None:
        """Send SIGTERM to all, wait until they have drained, kill what is left."""
        running = [(child.name, child.process) for child in children if child.process is not None]
        for _, process in running:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.config.drain_seconds + self.config.linger + 5.0
        for name, process in running:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log(f"{name} did not finish in time and is killed")
                process.kill()
                process.wait()
        for child in children:
            _close_stdin(child)


def make_shelf() -> Path:
    """Make a private directory in shared memory for shelves and measured costs.

    Directories of supervisors that were killed are removed.
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


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _json(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()


def _free_ports(count: int) -> list[int]:
    """Find ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def is_ready(url: str) -> bool:
    """Whether the process at `url` answers that it is ready."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
