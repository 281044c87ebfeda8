"""What the README tells people to type exists: commands, options, recipes, files."""

import re
import shlex
from pathlib import Path

import pytest

from slipstream.cli.app import run_command
from slipstream.config import recipe_path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line.split("#")[0])[1:] for line in re.findall(r"^    (slipstream .*)$", TEXT, re.M)
]


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 6 and "make demo" in TEXT and "make test" in TEXT


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_a_shown_command_exists(words, capsys):
    path = words[:2] if words[0] in ("data", "bench") else words[:1]
    assert run_command([*path, "--help"]) == 0
    told = capsys.readouterr().out
    assert not [word for word in words if word.startswith("--") and word not in told]
    for word in words:
        if word.endswith(".yaml"):
            assert recipe_path(word).is_file()


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and not [link for link in links if not (ROOT / link).exists()]
