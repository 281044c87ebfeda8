"""JSON that every reader accepts, and figures as people read them."""

import json
import math

import pytest

from slipstream.cli.output import print_json, show_age, show_figure


def test_what_is_no_number_is_null(capsys):
    print_json({"a": math.nan, "b": [1.5, math.inf, (2,)], "c": {"d": None}})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [1.5, None, [2]],
        "c": {"d": None},
    }


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "5 s"), (90, "2 min"), (7_200, "2 h"), (200_000, "2 d")]
)
def test_an_age_is_shown_in_its_largest_unit(seconds, shown):
    assert show_age(seconds) == shown


def test_figures_are_short():
    assert [show_figure(value) for value in (None, 0.12345, 3000.0, "x", 3)] == [
        *("", "0.1235", "3,000", "x", "3")
    ]
