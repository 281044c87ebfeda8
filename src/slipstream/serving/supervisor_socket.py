"""What an instance asks of its supervisor: to pin a version, and to record what is served.

One line of JSON each way over a Unix socket in the deployment's private directory. Touch this when
an instance needs something else of its supervisor.
"""

import contextlib
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.serving.bundle_pins import BundlePins
from slipstream.serving.versions import VersionRecord

ANSWER_SECONDS = 20.0
MAX_LINE = 65_536
RECORD_FILE = "versions.json"
log = logging.getLogger("slipstream.serving")


class PinAnswer(msgspec.Struct):
    """The version that the bundle's directory holds, pinned; or why it is not."""

    version: str = ""
    error: str = ""


class SupervisorRequest(msgspec.Struct):
    """Pin what is there now, or keep a record of what is served."""

    record: VersionRecord | None = None


class VersionKeeper:
    """The versions of one deployment: pinned, recorded, and told to instances that ask."""

    def __init__(
        self,
        bundle: Path,
        shelf: Path,
        tell: Callable[[str], None],
        retrieval: Path | None = None,
    ) -> None:
        self._pins, self._tell = BundlePins(bundle, shelf / "versions", retrieval), tell
        self._record_path = shelf / RECORD_FILE
        self._lock = threading.Lock()
        self.record = VersionRecord(self._pins.pin())
        self._write()
        path = shelf / "supervisor.sock"
        path.unlink(missing_ok=True)
        keeper = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = ANSWER_SECONDS

            def handle(self) -> None:
                self.wfile.write(msgspec.json.encode(keeper.answer(self.rfile.readline(MAX_LINE))))

        self._server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        self._server.daemon_threads = True
        os.chmod(path, 0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def answer(self, line: bytes) -> PinAnswer:
        """Do what a line asks for."""
        try:
            asked = msgspec.json.decode(line, type=SupervisorRequest)
            with self._lock:
                return PinAnswer(self._pins.pin() if asked.record is None else self._keep(asked))
        except (msgspec.DecodeError, SlipstreamError, OSError) as error:
            return PinAnswer(error=str(error))

    def _keep(self, asked: SupervisorRequest) -> str:
        record = asked.record
        assert record is not None
        for version in record.open_versions:
            self._pins.path(version)  # refuses one that could not be opened again
        if record.number > self.record.number:
            before, self.record = self.record, record
            self._write()
            self._pins.keep(record.kept_versions)
            if msgspec.structs.replace(before, number=record.number) != record:
                self._tell(describe_change(before, record))
        return record.stable

    def _write(self) -> None:
        beside = self._record_path.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(self.record))
        beside.replace(self._record_path)

    def close(self) -> None:
        """Answer nobody any more, and release every version."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._pins.close()


def describe_change(before: VersionRecord, after: VersionRecord) -> str:
    """Return the sentence of the log about another record."""
    if before.stable != after.stable:
        return f"serving version {after.stable[:16]} instead of {before.stable[:16]}"
    if after.candidate is None:
        return f"the candidate {str(before.candidate)[:16]} is no longer served"
    return (
        f"candidate {after.candidate[:16]} beside {after.stable[:16]}: {after.share:.1%} of the "
        f"users, {after.shadow:.1%} in the shadow"
    )


class SupervisedVersions:
    """An instance's side: the record as it is kept, pinned versions to open."""

    def __init__(self, shelf: Path) -> None:
        self._shelf, self._read_at = shelf, -1

    def read(self) -> VersionRecord:
        """Return the record."""
        return msgspec.json.decode((self._shelf / RECORD_FILE).read_bytes(), type=VersionRecord)

    def changed(self) -> VersionRecord | None:
        """Return the record where it was written since the last call, else None."""
        with contextlib.suppress(OSError):
            written = (self._shelf / RECORD_FILE).stat().st_mtime_ns
            if written != self._read_at:
                self._read_at = written
                return self.read()
        return None

    def path(self, version: str) -> Path:
        """Return the directory of a pinned version."""
        return self._shelf / "versions" / version

    def pin(self) -> str:
        """Let the supervisor pin what the bundle's directory holds; return its version."""
        return self._ask(SupervisorRequest())

    def keep(self, record: VersionRecord) -> None:
        """Let the supervisor keep a record, for instances that start again."""
        self._ask(SupervisorRequest(record))

    def _ask(self, question: SupervisorRequest) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(ANSWER_SECONDS)
                asking.connect(str(self._shelf / "supervisor.sock"))
                asking.sendall(msgspec.json.encode(question) + b"\n")
                asking.shutdown(socket.SHUT_WR)
                text = b"".join(iter(lambda: asking.recv(MAX_LINE), b""))
        except OSError as error:
            raise SlipstreamError(f"the supervisor does not answer ({error})") from error
        answer = msgspec.json.decode(text, type=PinAnswer)
        if answer.error:
            raise SlipstreamError(answer.error)
        return answer.version


class UnpinnedVersions:
    """For an instance without a supervisor: one version, the one its directory holds."""

    def __init__(self, read_version: Callable[[], str], directory: Path) -> None:
        self._read_version, self._directory = read_version, directory
        self._record = VersionRecord(read_version())

    def read(self) -> VersionRecord:
        """Return the record of this process."""
        return self._record

    def changed(self) -> VersionRecord | None:
        """Return None: nobody else changes it."""
        return None

    def path(self, version: str) -> Path:
        """Return the bundle's directory."""
        return self._directory

    def pin(self) -> str:
        """Return the version that the directory holds."""
        return self._read_version()

    def keep(self, record: VersionRecord) -> None:
        """Keep a record for this process."""
        self._record = record


Versions = SupervisedVersions | UnpinnedVersions
