"""The public API is exactly what docs/reference/api.md lists."""

import importlib
import subprocess
import sys

import pytest

import slipstream
from tests.support.public_api import DOCUMENT, document, line, public_names, rooms


def test_the_document_lists_exactly_the_public_names():
    listed = [text for text in DOCUMENT.read_text().splitlines() if text.startswith("- `")]
    names = {text.split("`")[1] for text in listed}
    found = {
        f"ss.{room}.{name}" if room else f"ss.{name}"
        for room, several in public_names().items()
        for name in several
    }
    assert names == found, "run: python -m tests.support.public_api --write"


def test_the_document_is_what_the_script_writes():
    assert DOCUMENT.read_text() == document(), "run: python -m tests.support.public_api --write"


@pytest.mark.parametrize("room", ["", *rooms()])
def test_every_public_name_can_be_reached_and_is_listed_by_dir(room):
    module = importlib.import_module(f"slipstream.{room}" if room else "slipstream")
    names = list(getattr(module, "__all__", []))
    assert len(names) == len(set(names)), "__all__ names each thing once"
    assert [name for name in names if not hasattr(module, name)] == []
    assert set(names) <= set(dir(module))


def test_rooms_are_those_of_the_architecture():
    assert rooms() == [
        "data",
        "history",
        "models",
        "ops",
        "pipeline",
        "serving",
        "tables",
        "training",
    ]


def test_every_name_has_a_line_of_its_own():
    lines = [line(room, name) for room, names in public_names().items() for name in names]
    assert len(lines) == len(set(lines))
    assert line("", "Run").startswith("- `ss.Run`: A trained run on disk")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'slipstream' has no attribute 'trian'"):
        slipstream.trian  # noqa: B018


@pytest.mark.system
def test_importing_slipstream_loads_no_heavy_module():
    code = "import sys, slipstream; dir(slipstream); print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"torch", "numpy", "polars", "pyarrow", "pydantic", "typer", "rich"}
    assert not heavy & set(ended.stdout.split())
