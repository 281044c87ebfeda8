"""Errors guess the word that was meant."""

import pytest

from slipstream.errors import did_you_mean


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("schedul", "; did you mean 'schedule'?"),
        ("Schedule", "; did you mean 'schedule'?"),
        ("xyz", "; choose one of recipe, schedule"),
    ],
)
def test_a_similar_word_is_guessed_and_otherwise_all_choices_are_listed(word, end):
    assert did_you_mean(word, ["schedule", "recipe"]) == end
