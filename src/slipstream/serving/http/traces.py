"""Traces of requests by OpenTelemetry: router, instance and stages as spans of one trace.

The extra `traces` brings the library; without an endpoint nothing of it is imported. A trace begins
with the caller's `traceparent`, or here for a share of the requests. Spans are exported in the
background by OTLP over HTTP. Touch this when spans should carry something else.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError

_PARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass
class Span:
    """A span that has begun."""

    span: Any
    header: str  # `traceparent` for what it calls
    began: int  # nanoseconds since 1970


class Tracer:
    """Begins and ends the spans of one process."""

    def __init__(self, endpoint: str, process: str, share: float = 0.01) -> None:
        """Export to `endpoint` (http://HOST:4318/v1/traces); trace `share` of new requests."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            raise SlipstreamError(
                "traces need their extra libraries: pip install 'slipstream[traces]'"
            ) from error
        self._trace = trace
        about = Resource.create({"service.name": "slipstream", "service.instance.id": process})
        self._provider = TracerProvider(
            resource=about, sampler=ParentBased(TraceIdRatioBased(share))
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=1_000, max_queue_size=4_096)
        )
        self._tracer = self._provider.get_tracer("slipstream")

    def begin(self, name: str, parent: bytes | None) -> Span | None:
        """Begin the span of a request; None where it is not traced."""
        trace, context = self._trace, None
        found = _PARENT.fullmatch(parent or b"")
        if found is not None:
            given = trace.SpanContext(
                int(found[1], 16), int(found[2], 16), True, trace.TraceFlags(int(found[3], 16))
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(given))
        began = time.time_ns()
        span = self._tracer.start_span(
            name, context=context, kind=trace.SpanKind.SERVER, start_time=began
        )
        about = span.get_span_context()
        if not about.trace_flags.sampled:
            return None
        header = f"00-{about.trace_id:032x}-{about.span_id:016x}-01"
        return Span(span, header, began)

    def end(
        self,
        span: Span,
        about: Mapping[str, Any],
        stages: list[tuple[str, float, float]],
    ) -> None:
        """End the span of a request, with a span for each of its stages."""
        inside = self._trace.set_span_in_context(span.span)
        for name, begin, end in stages:
            part = self._tracer.start_span(
                name, context=inside, start_time=span.began + int(1e9 * begin)
            )
            part.end(span.began + int(1e9 * end))
        span.span.set_attributes({name: value for name, value in about.items() if value != ""})
        span.span.end()

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
