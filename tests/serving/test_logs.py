"""Log lines: with their time, for people or as JSON, with the id of the request."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from slipstream.serving.logs import REQUEST_ID, LogFormatter, Occasionally, configure_logs

log = logging.getLogger("slipstream.serving")


@pytest.fixture
def kept_handlers() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("slipstream")
    before = (list(root.handlers), root.level, own.level)
    yield
    root.handlers[:], root.level, own.level = before
    logging.getLogger("slipstream").setLevel(before[2])


def lines(kind: str, level: str = "info") -> list[str]:
    stream = io.StringIO()
    configure_logs("i-0", kind, level, stream)
    token = REQUEST_ID.set("abc")
    try:
        log.info("ready %s", "again", extra={"fields": {"ms": 1.5}})
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
        logging.getLogger("a library").info("chatter")
    finally:
        REQUEST_ID.reset(token)
    return stream.getvalue().splitlines()


def test_text_has_time_level_process_and_fields(kept_handlers: None):
    first, second, *trace = lines("text")
    moment = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(moment + r" INFO    i-0: ready again ms=1.5 request_id=abc", first)
    assert " ERROR   i-0: failed request_id=abc" in second
    assert trace[-1] == "ValueError: why"


def test_json_is_one_object_a_line_also_with_a_traceback(kept_handlers: None):
    first, second = (json.loads(line) for line in lines("json"))
    assert first["time"].endswith("Z") and (first["level"], first["process"]) == ("info", "i-0")
    assert (first["message"], first["ms"], first["request_id"]) == ("ready again", 1.5, "abc")
    assert second["traceback"].endswith("ValueError: why")


def test_a_level_holds_back_what_is_below_it(kept_handlers: None):
    assert len(lines("json", "error")) == 1


def test_the_formatter_writes_utc_whatever_the_zone():
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None)
    record.created = 0.25
    formatted = LogFormatter("p", "text").format(record)
    assert formatted.startswith("1970-01-01T00:00:00.250Z INFO    p: hello")


def test_one_line_passes_now_and_then_and_tells_of_the_others():
    now = [0.0]
    rare = Occasionally(5.0, lambda: now[0])
    assert [rare.passes() for _ in range(3)] == [0, None, None]
    now[0] = 6.0
    assert (rare.passes(), rare.passes()) == (2, None)
