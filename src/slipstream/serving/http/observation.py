"""How the processes of a deployment are seen: their logs and traces, as the supervisor sets them.

Touch this when a process gets another setting of logs or traces.
"""

import atexit

import msgspec

from slipstream.serving.http.observed_request import Observer, set_observer
from slipstream.serving.http.traces import Tracer
from slipstream.serving.logs import LogFormat, LogRequests, configure_logs


class ObservationSettings(msgspec.Struct, kw_only=True):
    """Logs and traces of one process; without a name of the process, nothing is set up."""

    process: str = ""
    log_format: LogFormat = "text"
    log_level: str = "info"
    log_requests: LogRequests = "failed"
    traces: str | None = None  # where to send spans: http://HOST:4318/v1/traces
    trace_share: float = 0.01  # of the requests that bring no trace of their own


def observe(settings: ObservationSettings, secret: str) -> None:
    """Set up the logs and traces of this process; `secret` is the key of users' hashes."""
    if not settings.process:
        return
    configure_logs(settings.process, settings.log_format, settings.log_level)
    tracer = None
    if settings.traces is not None:
        tracer = Tracer(settings.traces, settings.process, settings.trace_share)
        atexit.register(tracer.close)
    set_observer(Observer(settings.log_requests, secret.encode(), tracer))
