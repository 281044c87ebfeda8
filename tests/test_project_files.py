"""Files around the package agree with it: one version, the same Pythons, hooks that exist."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import slipstream

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_that_names_the_version_names_this_one():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == slipstream.__version__
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == slipstream.__version__


def test_continuous_integration_runs_every_supported_python_with_both_torches():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    named = [
        words.rsplit(" ", 1)[1]
        for words in PROJECT["project"]["classifiers"]
        if words.startswith("Programming Language :: Python :: 3.")
    ]
    assert matrix == {"python": named, "torch": ["pinned", "lowest"]}


@pytest.mark.parametrize("name", ["torch", "typer", "polars", "pydantic"])
def test_what_is_pinned_is_at_least_the_lowest_allowed(name):
    pinned = re.search(rf"^{name}==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    lowest = re.search(rf'"{name}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())

    def numbers(found: re.Match) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", found[1])]

    assert numbers(pinned) >= numbers(lowest)


def test_every_hook_is_a_tool_of_the_dev_extra():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"].split()[0] for hook in config["repos"][0]["hooks"]]
    tools = {
        re.split(r"[>=\[;]", need)[0] for need in PROJECT["project"]["optional-dependencies"]["dev"]
    }
    assert {Path(entry).name for entry in entries} <= tools
    assert len(entries) == 3


def test_every_tool_of_make_dist_is_in_the_dev_extra():
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    assert [need for need in dev if need.startswith("build")]
    assert "-m build" in (ROOT / "Makefile").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_demo_installs_the_package_and_not_the_developer_s_tools(tmp_path):
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def steps(target: str) -> str:
        words = ["make", "--dry-run", target]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout

    assert '-e ".[serving]"' in steps("demo") and "slipstream demo" in steps("demo")
    assert "[dev]" not in steps("demo") and "apt-get" not in steps("demo")
    assert '-e ".[dev]"' in steps("test-fast") and "clang" in steps("test-fast")
    (tmp_path / ".venv").mkdir()  # what `make setup` leaves is enough for the demo
    for name in (".usable", ".installed"):
        (tmp_path / ".venv" / name).touch()
    assert "pip install" not in steps("demo") + steps("test-fast")
