"""Choices that do not exist are refused when they are made."""

import pytest

from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"nulls": "keep"}, "unknown choice 'keep' of nulls"),
        ({"duplicates": "drpo"}, "did you mean 'drop'"),
        ({"order": "random"}, "the one order is 'stable'"),
        ({"database": "x.db"}, "--database needs --sql"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(choice, expected):
    with pytest.raises(SlipstreamError, match=expected):
        Choices(**choice)


def test_what_is_not_chosen_is_left_to_the_data():
    choices = Choices()
    assert (choices.nulls, choices.duplicates, choices.time_unit) == (None, None, None)
    assert choices.columns.time_optional and FeatureFile().data is None


def test_one_name_or_a_list_of_names_will_do():
    assert FeatureFile(features="price").features == ("price",)
    assert FeatureFile(features=["a", "b"]).features == ("a", "b")
    assert Columns("u", "i", "t", "click").actions == ("click",)
    assert Columns("u", "i", "t", ["click", "like"]).actions == ("click", "like")
