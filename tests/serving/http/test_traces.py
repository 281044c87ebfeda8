"""Traces: spans go to a real OTLP receiver, with the caller's trace as their parent."""

from collections.abc import Iterator

import pytest

from slipstream.serving.http.traces import Tracer
from tests.support.span_receiver import Receiver

pytest.importorskip("opentelemetry.sdk")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_a_request_and_its_stages_are_spans_of_the_callers_trace(receiver: Receiver):
    tracer = Tracer(receiver.url, "router-0", share=0.0)
    span = tracer.begin("rank", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01")
    assert span is not None and span.header.startswith("00-" + "ab" * 16)
    about = {"http.response.status_code": 200, "slipstream.hit": ""}
    tracer.end(span, about, [("store", 0.001, 0.002)])
    tracer.close()
    found = {each.name: each for process, each in receiver.spans if process == "router-0"}
    assert set(found) == {"rank", "store"}
    assert found["rank"].parent_span_id.hex() == "cd" * 8
    assert found["store"].parent_span_id == found["rank"].span_id
    assert {each.trace_id.hex() for each in found.values()} == {"ab" * 16}
    lasted = found["store"].end_time_unix_nano - found["store"].start_time_unix_nano
    assert lasted == pytest.approx(1_000_000, abs=1_000)
    assert [a.key for a in found["rank"].attributes] == ["http.response.status_code"]


def test_a_share_of_the_requests_begins_a_trace_and_an_unsampled_one_stays_so(receiver: Receiver):
    never, always = Tracer(receiver.url, "p", 0.0), Tracer(receiver.url, "p", 1.0)
    assert never.begin("rank", None) is None
    assert always.begin("rank", None) is not None
    unsampled = b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-00"
    assert always.begin("rank", unsampled) is None
    assert always.begin("rank", b"nonsense") is not None
    for tracer in (never, always):
        tracer.close()
