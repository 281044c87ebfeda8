"""The rules a bundle carries, and those of a bundle from before they were written."""

from pathlib import Path

import pytest

from slipstream.bundle import Bundle
from slipstream.serving.engine.serving_rules import ServingRules

MODEL = {"max_len": 80}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"model": MODEL, "sampler": {"max_len": 40}}, ServingRules(True, "stepped", 80)),
        ({"model": MODEL, "window": "latest"}, ServingRules(True, "latest", 80)),
        (
            {"model": MODEL, "window": "stepped", "repeat": "allow", "sampler": {"max_len": 40}},
            ServingRules(False, "stepped", 40),
        ),
        (
            {"model": MODEL, "window": "latest", "repeat": "exclude", "sampler": {"max_len": 99}},
            ServingRules(True, "latest", 80),
        ),
    ],
)
def test_rules_come_from_the_recipe(recipe, expected):
    description = {"recipe": recipe, "sizes": {}}
    assert ServingRules.of(Bundle(Path(), description, {})) == expected


def test_the_window_is_exact_or_moves_in_steps():
    latest, stepped = (ServingRules(True, rule, 80) for rule in ("latest", "stepped"))
    assert [latest.window_start(n) for n in (80, 81, 95)] == [0, 1, 15]
    assert [stepped.window_start(n) for n in (80, 81, 95)] == [0, 10, 20]
    assert latest.window_start(100, oldest=33) == 33
