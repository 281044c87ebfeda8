"""The messages' limits hold before anything else is done, and their names are the wire's."""

import msgspec
import pytest

from slipstream.serving.http import messages as m


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (m.RankRequest, b'{"user": "", "candidates": [1]}', "length"),
        (m.RankRequest, b'{"user": "u", "candidates": []}', "length"),
        (m.RankRequest, b'{"user": "u", "candidates": [-1]}', ">= 0"),
        (m.RankRequest, b'{"user": "u", "candidates": [1.5]}', "int"),
        (m.RankRequest, b'{"user": "u", "candidates": [9223372036854775808]}', "<="),
        (m.RankRequest, b'{"user": "u", "candidates": [1], "histroy": {}}', "unknown field"),
        (m.RankRequest, b'{"user": "u", "candidates": [' + b"1," * 10_000 + b"1]}", "length"),
        (m.PreinferRequest, b'{"user": "u", "rank_in_ms": -1}', ">= 0"),
        (m.RecommendRequest, b'{"user": "u", "count": 100000}', "<= 1000"),
        (m.HistoryMessage, b'{"items": [1], "timestamps": [4611686018427387904]}', "<="),
        (m.EventsRequest, b'{"user": "u", "items": [], "timestamps": []}', "length"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_outside_the_limits_is_refused(kind: type, body: bytes, says: str):
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.json.decode(body, type=kind)


def test_a_request_keeps_its_names_on_the_wire():
    history = m.HistoryMessage([1], [2], {"click": [1.0]})
    sent = m.RankRequest("ann", [5], history, m.HistoryMessage([3], [4]), {"age": 1}, "t", True)
    assert msgspec.json.decode(msgspec.json.encode(sent)) == {
        "user": "ann",
        "candidates": [5],
        "history": {"items": [1], "timestamps": [2], "actions": {"click": [1.0]}},
        "recent": {"items": [3], "timestamps": [4], "actions": {}},
        "features": {"age": 1},
        "ticket": "t",
        "allow_truncate": True,
    }
