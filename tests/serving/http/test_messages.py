"""The messages' limits hold before anything else is done, and their names are the wire's."""

import msgspec
import pytest

from slipstream.serving.http import messages as m


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (m.RankRequest, b'{"user": "", "candidates": [1]}', "length"),
        (m.RankRequest, b'{"user": "u", "candidates": []}', "length"),
        (m.RankRequest, b'{"user": "u", "candidates": [""]}', "length"),
        (m.RankRequest, b'{"user": "u", "candidates": [true]}', "got `bool`"),
        (m.RankRequest, b'{"user": "u", "candidates": ["' + b"x" * 257 + b'"]}', "length"),
        (m.RankRequest, b'{"user": "u", "candidates": [-9223372036854775809]}', ">="),
        (m.RankRequest, b'{"user": "u", "candidates": [1], "request_time": 1.5}', "int"),
        (m.RankRequest, b'{"user": "u", "candidates": [1], "context": {"s": ["a"]}}', "str"),
        (m.EventsRequest, b'{"user": "u", "items": [1], "context": {"s": [""]}}', "length >= 1"),
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
        "history": {"items": [1], "timestamps": [2], "actions": {"click": [1.0]}, "context": {}},
        "recent": {"items": [3], "timestamps": [4], "actions": {}, "context": {}},
        "features": {"age": 1},
        "ticket": "t",
        "allow_truncate": True,
        "request_time": None,
        "titles": False,
        "show": [],
        "context": {},
    }


def test_ids_are_whole_numbers_of_any_sign_or_text():
    body = b'{"user": "u", "items": [-9223372036854775808, 12, "12", "RUG/0002-X"]}'
    sent = msgspec.json.decode(body, type=m.EventsRequest)
    assert sent.items == [-(2**63), 12, "12", "RUG/0002-X"] and sent.timestamps is None


def test_the_rule_of_repeats_is_the_models_unless_a_request_says_otherwise():
    for rule, expected in ((b"null", None), (b"true", True), (b"false", False)):
        body = b'{"user": "u", "keep_seen": ' + rule + b"}"
        assert msgspec.json.decode(body, type=m.RecommendRequest).keep_seen is expected
    assert m.RecommendRequest("u").keep_seen is None
