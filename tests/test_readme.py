"""The first page is short, starts with two commands, and shows quality with its condition.

Links, commands and options of all pages are checked in test_docs.py.
"""

import re
from pathlib import Path

import pytest

from slipstream.config import recipe_path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_two_commands_are_the_demo_and_the_tests():
    assert re.findall(r"^    (\S+ \S+)", TEXT, re.M)[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_makefile_has_the_two_commands(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"recipes/[\w-]+\.yaml", TEXT))))
def test_every_named_recipe_is_shipped(name):
    assert recipe_path(name).is_file()


def test_quality_stands_with_and_without_the_time_of_the_request():
    rows = [line for line in TEXT.splitlines() if re.match(r"\|.*\| 0\.\d{4} \|", line)]
    assert any("knows the time of the request" in row for row in rows)
    assert any("tested without the time of the request" in row for row in rows)


def test_the_page_is_short():
    assert len(TEXT.splitlines()) <= 120
