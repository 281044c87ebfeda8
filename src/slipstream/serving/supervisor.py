"""The supervisor of `slipstream serve`: starts instances and routers, restarts what dies or hangs.

The supervisor holds the public socket and the routers inherit it: while a router restarts, new
connections wait instead of failing. Instances listen on Unix sockets. Children notice the
supervisor's death by the end of their stdin, the supervisor notices one that hangs by its
heartbeat. At the end routers stop first, because their last requests need the instances, then the
instances. Touch this when processes are started, restarted or ended in another way.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.serving.cluster_config import CLUSTER_KEY_VARIABLE, ClusterConfig
from slipstream.serving.heartbeat import Heartbeat
from slipstream.serving.http.process import (
    CANNOT_START,
    INSTANCE_KEY_VARIABLE,
    KEYS_VARIABLE,
    SECRET_VARIABLE,
    listening_socket,
    reserve_port,
)
from slipstream.serving.http.process_life import END_NOW
from slipstream.serving.http.readiness import is_ready
from slipstream.serving.shelf_directory import ShelfDirectory
from slipstream.serving.supervisor_socket import VersionKeeper
from slipstream.serving.ticket_key import read_ticket_key

TICK_SECONDS = 0.05
QUICK_DEATH_SECONDS = 5.0
MAX_QUICK_DEATHS = 5  # in a row, before it ever was ready: then restarting does not help
MAX_BACKOFF_SECONDS = 5.0
SPARE_DELAY_SECONDS = 1.5
START_SECONDS = 120.0


@dataclass
class Child:
    """A process to keep alive: its command, its settings (JSON), how its last starts went."""

    name: str
    command: tuple[str, ...]
    settings: str
    url: str
    heartbeat: Heartbeat
    inherited: tuple[int, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    start_again_at: float = 0.0
    quick_deaths: int = 0
    restarts: int = 0
    was_ready: bool = False
    ready: bool = False  # the present process


@dataclass(frozen=True)
class DeploymentConfig:
    """The instances and routers to run; `-` is added to a command: settings come from stdin."""

    instances: int
    instance_settings: dict[str, Any]
    routers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    router_settings: dict[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()  # lines as in a key file
    tls: tuple[str, str] | None = None  # files: certificate and key
    pools: tuple[str, ...] = ()
    drain_seconds: float = 10.0
    linger: float = 0.6
    hang_seconds: float = 2.5  # a process whose heart has not beaten for so long is killed
    cluster: ClusterConfig | None = None  # None: all is on this machine
    state: Path | None = None  # directory of the ticket key; None: tickets end with the supervisor
    observation: dict[str, Any] = field(default_factory=dict)  # logs and traces of the processes
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
        self._socket: socket.socket | None = None
        self.port = config.port
        if config.routers:
            self._socket = _bind(listening_socket, config.host, config.port, "--port")
            self.port = self._socket.getsockname()[1]
        self.url = _url(config.host, self.port, "https" if config.tls else "http")
        self._reserved = self._reserve_ports()
        self.addresses = [_url(*each.getsockname()[:2]) for each in self._reserved]
        threads = str(config.instance_settings.get("model", {}).get("threads", 1))
        cluster = config.cluster
        self._environment = {
            **os.environ,
            SECRET_VARIABLE: self._ticket_secret(),
            KEYS_VARIABLE: "\n".join(config.api_keys),
            INSTANCE_KEY_VARIABLE: cluster.instance_key() if cluster else secrets.token_hex(32),
            CLUSTER_KEY_VARIABLE: "",  # the processes need what is derived of it only
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        self._peers = [] if cluster is None else list(cluster.peers)
        self._directory = ShelfDirectory(config.state)
        self._shelf = self._directory.path
        self._watched_since = time.monotonic()
        for counts in self._shelf.glob("*.metrics"):
            counts.unlink(missing_ok=True)  # of an earlier deployment, perhaps with more routers
        try:
            self.versions = self._keep_versions() if config.instances else None
        except BaseException:
            self._close()
            raise
        self.instances = [self._instance(number) for number in range(config.instances)]
        self._spare: subprocess.Popen[bytes] | None = None
        self.routers = [self._router(number) for number in range(config.routers)]

    def _reserve_ports(self) -> list[socket.socket]:
        """Take the ports at which other machines reach the instances, so that nobody else does."""
        cluster = self.config.cluster
        if cluster is None or cluster.listen is None:
            return []
        host, port = cluster.listen
        found: list[socket.socket] = []
        try:
            for number in range(self.config.instances):
                at = port + number if port else 0
                found.append(_bind(reserve_port, host, at, "--listen-instances"))
        except SlipstreamError:
            self._close_sockets(found)
            raise
        return found

    def _keep_versions(self) -> VersionKeeper:
        settings = self.config.instance_settings
        given = settings.get("retrieval")
        retrieval = None if given is None else Path(given)
        return VersionKeeper(Path(settings["bundle"]), self._shelf, self._log, retrieval)

    def _close(self) -> None:
        self._close_sockets(self._reserved)
        self._directory.remove()

    def _close_sockets(self, reserved: list[socket.socket]) -> None:
        for each in reserved if self._socket is None else [self._socket, *reserved]:
            each.close()

    def _ticket_secret(self) -> str:
        """Return the secret of environment, cluster or state directory, or a new one."""
        given = os.environ.get(SECRET_VARIABLE)
        if not given and self.config.cluster is not None:
            return self.config.cluster.ticket_secret()
        if given or self.config.state is None:
            return given or secrets.token_hex(32)
        return read_ticket_key(self.config.state)

    # What to start

    def _instance(self, number: int) -> Child:
        cluster = self.config.cluster
        name = f"i-{number}" if cluster is None else f"{cluster.machine}-i-{number}"
        path = str(self._shelf / f"i-{number}.sock")  # within the few letters a socket's may have
        settings: dict[str, Any] = {
            **self.config.instance_settings,
            **self._common_settings(name),
            "name": name,
            "shelf": str(self._shelf),
            "pinned": True,
            "socket_path": path,
            "linger": self.config.linger,
        }
        if self._reserved:
            settings["open_to"] = self._reserved[number].getsockname()[:2]
        settings["observation"]["log_requests"] = "none"  # routers log them, with their instance
        return Child(
            name,
            self.config.instance_command,
            _json(settings),
            f"unix:{path}",
            Heartbeat(self._beat_path(name)),
        )

    def _common_settings(self, name: str) -> dict[str, Any]:
        return {
            "drain_seconds": self.config.drain_seconds,
            "watch_parent": True,
            "heartbeat": str(self._beat_path(name)),
            "observation": {**self.config.observation, "process": name},
        }

    def _beat_path(self, name: str) -> Path:
        return self._shelf / f"{name}.beat"

    def _router(self, number: int) -> Child:
        assert self._socket is not None
        name = f"router-{number}"
        pools = self.config.pools or ("any",) * len(self.instances)
        settings = {
            **self.config.router_settings,
            **self._common_settings(name),
            "socket_fd": self._socket.fileno(),
            "host": self.config.host,
            **dict(zip(("tls_certificate", "tls_key"), self.config.tls or (), strict=False)),
            "rate_file": str(self._shelf / "rates"),
            "metrics_file": str(self._shelf / f"{name}.metrics"),
            "peers": self._peers,
            "peers_kept": str(self._shelf / f"{name}.peers"),
            "instances": [
                {"name": child.name, "url": child.url, "pool": pool}
                for child, pool in zip(self.instances, pools, strict=True)
            ],
        }
        return Child(
            name,
            self.config.router_command,
            _json(settings),
            self.url,
            Heartbeat(self._beat_path(name)),
            (self._socket.fileno(),),
        )

    # Running

    def run(self) -> None:
        """Start all processes and watch them; return after `stop`, when all have ended."""
        children = [*self.instances, *self.routers]
        try:
            for child in self.instances:
                self._start(child)
            for child in self.routers:  # they import meanwhile, and first probe ready instances
                child.heartbeat.reset()
                child.process = self._open(child.command, child.inherited)
                child.started_at = time.monotonic()
            self._await_ready(self.instances)
            for child, address in zip(self.instances, self.addresses, strict=False):
                self._log(f"routers of other machines reach {child.name} at {address}")
            for child in self.routers:
                self._send_settings(child, child.process)
            self._await_ready(self.routers, alive=not self.instances)
            self.all_ready = not self._stop
            while not self._stop:
                for child in children:
                    self._restart_if_dead(child)
                self._keep_spare()
                self._sleep()
        finally:
            self._end_spare()
            self._end(self.routers)
            self._end(self.instances, linger=bool(self._reserved))
            if self.versions is not None:
                self.versions.close()
            self._close()

    def stop(self, *_signal: object) -> None:
        """Ask `run` to end; safe in a signal handler."""
        self._stop = True

    def _start(self, child: Child) -> None:
        child.heartbeat.reset()
        spare, self._spare = (self._spare, None) if child in self.instances else (None, self._spare)
        if spare is None or spare.poll() is not None:
            spare = self._open(child.command, child.inherited)
        self._send_settings(child, spare)

    def _send_settings(self, child: Child, process: "subprocess.Popen[bytes] | None") -> None:
        """Let a process that waits for its settings become the child's."""
        assert process is not None and process.stdin is not None
        with contextlib.suppress(OSError):  # it may die just now: noticed like any other death
            process.stdin.write(child.settings.encode() + b"\n")
            process.stdin.flush()
        child.process, child.ready = process, False
        child.started_at = time.monotonic()

    def _open(
        self, command: tuple[str, ...], inherited: tuple[int, ...] = ()
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*command, "-"],
            stdin=subprocess.PIPE,
            env=self._environment,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to handle
        )

    def _keep_spare(self) -> None:
        """Start a spare process where none runs, once the youngest instance has had its start."""
        if (
            not self.config.spare
            or not self.instances
            or (self._spare is not None and self._spare.poll() is None)
        ):
            return
        youngest = max(child.started_at for child in self.instances)
        if time.monotonic() - youngest > SPARE_DELAY_SECONDS:
            self._spare = self._open(self.config.instance_command)

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
            self._watch(child, child.process, now)
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

    def _watch(self, child: Child, process: "subprocess.Popen[bytes]", now: float) -> None:
        """Kill a process that hangs; say when a restarted one is ready."""
        beat = child.heartbeat.silent_since()
        if child.heartbeat.begun and not child.ready:
            child.ready = True
            if child.was_ready:
                seconds = now - child.started_at
                self._log(f"{child.name} is ready again, {seconds:.1f} s after its start")
        if beat is not None:
            silent, limit = now - max(beat, self._watched_since), self.config.hang_seconds
        else:
            silent, limit = now - child.started_at, START_SECONDS
        if silent > limit and (beat is not None or not child.heartbeat.begun):
            self._log(f"{child.name} hangs: no heartbeat for {silent:.1f} s; killing it")
            process.kill()
            process.wait()

    def _sleep(self) -> None:
        """Sleep for a tick; where it took far longer, all processes were stopped, not only one."""
        before = time.monotonic()
        time.sleep(TICK_SECONDS)
        if time.monotonic() - before > self.config.hang_seconds / 2:
            self._watched_since = time.monotonic()

    def _await_ready(self, children: list[Child], *, alive: bool = False) -> None:
        """Wait until every child is ready, or `alive`; restart those that die meanwhile.

        Routers share one address, so each also shows by its heartbeat that it accepts requests.
        Those that have no instances but peers may be ready much later.
        """
        end, waiting = time.monotonic() + START_SECONDS, [*children]
        while waiting and not self._stop:
            if time.monotonic() > end:
                raise SlipstreamError(
                    f"{waiting[0].name} was not ready within {START_SECONDS:.0f} s; is the bundle "
                    "too large?"
                )
            for child in children:
                self._restart_if_dead(child)
            begun = [each for each in waiting if each.heartbeat.begun]
            for child in [each for each in begun if alive or is_ready(each.url)]:
                child.was_ready = child.ready = True
                waiting.remove(child)
                self._log(f"{child.name} is ready")
            self._sleep()

    def _end(self, children: list[Child], *, linger: bool = False) -> None:
        """End all at once, wait until they have drained, kill what is left.

        Unless they `linger`, no router is there to notice that they drain.
        """
        running = [(child.name, child.process) for child in children if child.process is not None]
        for _, process in running:
            with contextlib.suppress(OSError):  # it has ended already
                assert process.stdin is not None
                process.stdin.write(b"" if linger else END_NOW)
                process.stdin.flush()
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


def _bind(
    opener: Callable[[str, int], socket.socket], host: str, port: int, flag: str
) -> socket.socket:
    try:
        return opener(host, port)
    except OSError as error:
        raise SlipstreamError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another {flag}"
        ) from error


def _url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _close_stdin(child: Child) -> None:
    if child.process is not None and child.process.stdin is not None:
        with contextlib.suppress(OSError):
            child.process.stdin.close()


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _json(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()
