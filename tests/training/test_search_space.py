"""The ranges of a search: read without eval, drawn by name, refused in one sentence."""

import math

import pytest

from slipstream.errors import SlipstreamError
from slipstream.training.search_space import Range, draw_settings, parse_range, parse_space


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("choice(0.1, 0.2,0.5)", Range("choice", (0.1, 0.2, 0.5))),
        ("choice(hstu, true, null, 3)", Range("choice", ("hstu", True, None, 3))),
        ("choice([1, 2], 'a,b')", Range("choice", ([1, 2], "a,b"))),
        ("choice(1e-3, exact)", Range("choice", (1e-3, "exact"))),
        (" log(1e-4, 1e-2) ", Range("log", (1e-4, 1e-2))),
        ("uniform(-1, 0.5)", Range("uniform", (-1.0, 0.5))),
        ("int(1, 8)", Range("int", (1, 8))),
    ],
)
def test_a_range_is_read(text, expected):
    assert parse_range("model.dropout", text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1", "is no range; write choice"),
        ("lgo(1, 2)", "did you mean 'log'"),
        ("log(0, 1)", "above 0; use uniform"),
        ("int(1.5, 3)", "'1.5', which is not a whole number"),
        ("uniform(1)", "needs two numbers"),
        ("uniform(2, 1)", "the smaller one first"),
        ("uniform(0, inf)", "not finite"),
        ("__import__(os)", "unknown range '__import__'"),
    ],
)
def test_what_is_no_range_is_refused(text, message):
    with pytest.raises(SlipstreamError, match=message):
        parse_range("model.dropout", text)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ([], "nothing to search"),
        (["optimizer.lr"], "not of the form KEY=RANGE"),
        (["optimzer.lr=log(1, 2)"], "did you mean 'optimizer.lr'"),
        (["split.by=choice(last, time)"], "would not compare"),
        (["train.metric=choice(HR@10, MRR)"], "would not compare"),
        (["model.dim=int(1, 2)", "dim=int(1, 2)"], "model.dim is searched twice"),
    ],
)
def test_a_wrong_space_is_refused(over, message):
    with pytest.raises(SlipstreamError, match=message):
        parse_space(over)


def test_a_mapping_and_texts_say_the_same():
    texts = ["optimizer.lr=log(1e-4, 1e-2)", "model.dropout=choice(0.1, 0.2)"]
    mapping = {"optimizer__lr": "log(1e-4, 1e-2)", "model.dropout": [0.1, 0.2]}
    assert parse_space(texts) == parse_space(mapping)


def test_draws_stay_in_their_range_and_fill_it():
    space = {
        "a": Range("log", (1e-4, 1e-2)),
        "b": Range("int", (1, 3)),
        "c": Range("uniform", (-1.0, 1.0)),
    }
    drawn = draw_settings(space, 400, seed=1)
    assert all(1e-4 <= one["a"] <= 1e-2 and -1 <= one["c"] <= 1 for one in drawn)
    assert {one["b"] for one in drawn} == {1, 2, 3}
    below = sum(one["a"] < 1e-3 for one in drawn)
    assert abs(below - 200) < 4 * math.sqrt(100)  # half of them: even in the logarithm


def test_more_trials_and_more_keys_keep_the_draws_before():
    small, large = (
        {"a": Range("uniform", (0.0, 1.0))},
        {
            "b": Range("int", (1, 3)),
            "a": Range("uniform", (0.0, 1.0)),
        },
    )
    few, many = draw_settings(small, 3, seed=7), draw_settings(large, 9, seed=7)
    assert few == [{"a": one["a"]} for one in many[:3]]
    assert few != draw_settings(small, 3, seed=8)


def test_a_small_space_is_tried_once():
    drawn = draw_settings({"a": Range("choice", (1, 2))}, 16, seed=0)
    assert sorted(one["a"] for one in drawn) == [1, 2]
