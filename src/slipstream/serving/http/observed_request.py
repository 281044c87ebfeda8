"""What is known of a request while it is served: its id, its user's hash, its stages, its span.

An id comes with the request (`x-request-id`) or is made, goes on to the instance and returns with
the answer; every log line of the request has it. Touch this when a request should be seen in
another way; counting is in request_metrics.py.
"""

import hashlib
import logging
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from slipstream.serving.http.traces import Span, Tracer
from slipstream.serving.logs import REQUEST_ID, LogRequests

ID_HEADER, HIT_HEADER, REASON_HEADER, TIMING_HEADER = (
    "x-request-id",
    "x-slipstream-hit",
    "x-slipstream-reason",
    "server-timing",
)
TRACE_HEADER = "traceparent"
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NAMES = {name.encode(): name for name in (ID_HEADER, TRACE_HEADER)}
log = logging.getLogger("slipstream.requests")


@dataclass
class ObservedRequest:
    """One request; what becomes known of it is filled in on the way."""

    request_id: str
    span: Span | None = None
    user: str | None = None
    instance: str = ""
    hit: str = ""
    reason: str = ""
    stages: str = ""  # as Server-Timing has them
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # seconds since the begin

    def forwarded(self) -> bytes:
        """Return the header lines that take the request on to an instance."""
        lines = f"{ID_HEADER}: {self.request_id}\r\n"
        if self.span is not None:
            lines += f"{TRACE_HEADER}: {self.span.header}\r\n"
        return lines.encode()

    def note_answer(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Read what an instance's answer says of its request."""
        for name, value in headers:
            if name == b"x-slipstream-hit":
                self.hit = value.decode("latin-1")
            elif name == b"x-slipstream-reason":
                self.reason = value.decode("latin-1")
            elif name == b"server-timing":
                self.stages = value.decode("latin-1")

    def note_stages(self, found: list[tuple[str, float, float]]) -> None:
        """Take the stages that ran in this process."""
        self.spans = found
        self.stages = ", ".join(f"{name};dur={1e3 * (end - at):.2f}" for name, at, end in found)


class Observer:
    """How a process sees its requests: which it logs, and whether it traces them."""

    def __init__(
        self, log_requests: LogRequests = "none", key: bytes = b"", tracer: Tracer | None = None
    ) -> None:
        self._log_requests, self._key, self._tracer = log_requests, key[:64], tracer

    def begin(self, scope: Scope, name: str) -> ObservedRequest:
        """Note that a request has come."""
        given: dict[str, bytes] = {}
        for key, value in scope["headers"]:
            if key in _NAMES:
                given[_NAMES[key]] = value
        found = given.get(ID_HEADER, b"")
        request_id = found.decode() if _ID.fullmatch(found) else secrets.token_hex(8)
        REQUEST_ID.set(request_id)
        span = None
        if self._tracer is not None:
            span = self._tracer.begin(name, given.get(TRACE_HEADER))
        return ObservedRequest(request_id, span)

    def end(self, observed: ObservedRequest, name: str, status: int, seconds: float) -> None:
        """Note that a request was answered."""
        if observed.span is not None and self._tracer is not None:
            about = {"http.response.status_code": status, "slipstream.hit": observed.hit}
            about |= {"slipstream.reason": observed.reason, "request.id": observed.request_id}
            self._tracer.end(observed.span, about, observed.spans)
        wanted = self._log_requests == "all" or (self._log_requests == "failed" and status >= 500)
        if not wanted:
            return
        fields: dict[str, Any] = {
            "request_id": observed.request_id,
            "endpoint": name,
            "status": status,
            "ms": round(1e3 * seconds, 2),
        }
        if observed.user is not None:
            fields["user_hash"] = self.user_hash(observed.user)
        for word in ("instance", "hit", "reason"):
            if getattr(observed, word):
                fields[word] = getattr(observed, word)
        fields |= stage_fields(observed.stages)
        log.log(logging.WARNING if status >= 500 else logging.INFO, "%s", name, extra={
            "fields": fields
        })  # fmt: skip

    def user_hash(self, user: str) -> str:
        """Return what stands for a user in logs: the same in every process, and no way back."""
        name = user.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(name, digest_size=8, key=self._key).hexdigest()


def stage_fields(timing: str) -> dict[str, float]:
    """Return the milliseconds of each stage of a Server-Timing header."""
    found: dict[str, float] = {}
    for part in filter(None, timing.split(", ")):
        name, _, duration = part.partition(";dur=")
        found[f"{name}_ms"] = round(found.get(f"{name}_ms", 0.0) + float(duration or 0), 2)
    return found


_present = Observer()


def observer() -> Observer:
    """Return this process's observer."""
    return _present


def set_observer(chosen: Observer) -> None:
    """Let this process see its requests in another way."""
    global _present
    _present = chosen
