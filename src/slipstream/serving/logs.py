"""The logs of a server's processes: lines of text with their time, or JSON, one object a line.

Fields of a line (`extra={"fields": {…}}`) stay fields in JSON and follow the sentence in text.
Touch this when log lines look different.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]
LogRequests = Literal["none", "failed", "all"]
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
OWN = "slipstream"


class LogFormatter(logging.Formatter):
    """Makes a line of a record: time (UTC, milliseconds), level, process, sentence, fields."""

    def __init__(self, process: str, kind: LogFormat) -> None:
        super().__init__()
        self._process, self._kind = process, kind

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, also where the record has a traceback and the format is JSON."""
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        request = REQUEST_ID.get()
        if request is not None:
            fields.setdefault("request_id", request)
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        sentence, moment = record.getMessage(), _moment(record.created)
        if self._kind == "json":
            line = {"time": moment, "level": record.levelname.lower(), "process": self._process}
            line |= {"message": sentence, **fields}
            if trace:
                line["traceback"] = trace
            return json.dumps(line, default=str)
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        text = f"{moment} {record.levelname:<7} {self._process}: {sentence}"
        return "\n".join(filter(None, (f"{text} {words}".rstrip(), trace)))


def configure_logs(
    process: str,
    kind: LogFormat = "text",
    level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Send all logs of this process to `stream` (stderr); libraries only their warnings."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogFormatter(process, kind))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(OWN).setLevel(level.upper())


def _moment(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


class Occasionally:
    """Lets one line pass every few seconds, and tells how many were held back."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._again_at, self._held = 0.0, 0

    def passes(self) -> int | None:
        """Return how many lines were held back since the last one, None to hold this one back."""
        now = self._clock()
        if now < self._again_at:
            self._held += 1
            return None
        held, self._held, self._again_at = self._held, 0, now + self._seconds
        return held
