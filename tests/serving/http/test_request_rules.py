"""A request's message becomes the rules of its items."""

import msgspec
import numpy as np
import pytest

from slipstream.serving.engine.item_rules import Boost, ItemRules, NumberRange
from slipstream.serving.http.messages import RecommendRequest
from slipstream.serving.http.request_rules import read_rules
from slipstream.serving.request_errors import BadRequest


def request(**fields: object) -> RecommendRequest:
    return msgspec.json.decode(
        msgspec.json.encode({"user": "ann", **fields}), type=RecommendRequest
    )


def test_every_rule_arrives():
    sent = request(
        exclude=["a", 7],
        allow=[1, 2],
        where={"genre": ["war", "love", "war"], "year": {"from": 1990}},
        exclude_where={"year": {"to": 1999.5}},
        boosts=[{"add": 0.5, "items": [3]}, {"add": -1, "where": {"genre": ["noir"]}}],
        most_per={"genre": 2},
    )
    rules = read_rules(sent, np.array([5, 6]))
    assert rules.exclude.tolist() == ["a", "7", 5, 6]
    assert rules.allow.tolist() == [1, 2]
    assert rules.where == {"genre": ("love", "war"), "year": NumberRange(1990, None)}
    assert rules.exclude_where == {"year": NumberRange(None, 1999.5)}
    assert rules.boosts == (Boost(0.5, (3,)), Boost(-1, (), {"genre": ("noir",)}))
    assert rules.most_per == {"genre": 2}


def test_nothing_asked_is_no_rule():
    rules = read_rules(request(), None)
    assert not len(rules.exclude) and rules == ItemRules(exclude=rules.exclude)


@pytest.mark.parametrize(
    "fields",
    [
        {"where": {"genre": []}},
        {"where": {"genre": "war"}},
        {"where": {"year": {"least": 3}}},
        {"boosts": [{"add": 1e9, "items": [1]}]},
        {"most_per": {"genre": 0}},
        {"popular_days": 0},
    ],
)
def test_what_makes_no_sense_is_refused_by_the_message(fields):
    with pytest.raises(msgspec.ValidationError):
        request(**fields)


def test_a_boost_of_nothing_is_refused():
    with pytest.raises(BadRequest, match="send its `items`"):
        read_rules(request(boosts=[{"add": 1}]), None)
