"""Imports point one way: a room knows only what docs/architecture.md lets it know."""

import ast
from pathlib import Path

import slipstream

ROOT = Path(slipstream.__file__).parent
HALL = {
    "errors",
    "files",
    "interrupts",
    "bundle",
    "__version__",
}  # plain helpers every room may use
MAY_KNOW = {
    "data": set(),
    "ops": set(),
    "models": {"ops"},
    "tables": {"ops"},
    "pipeline": {"ops", "tables"},
    "training": {"data", "ops", "models", "tables", "pipeline"},
    "serving": {"models", "ops"},
    "simulate": {"pipeline", "serving"},
    "study": {"data", "tables", "pipeline", "training"},
}


def imported_rooms(source: str) -> set[str]:
    """The rooms of slipstream that a module's source imports, wherever the import stands."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room: write the full path"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("slipstream.")}
    return rooms


def violations(room: str, source: str) -> set[str]:
    return imported_rooms(source) - MAY_KNOW[room] - HALL - {room}


def test_no_room_knows_what_it_may_not():
    found = {
        str(path.relative_to(ROOT)): bad
        for room in MAY_KNOW
        for path in sorted((ROOT / room).rglob("*.py"))
        if (bad := violations(room, path.read_text()))
    }
    assert not found


def test_the_check_can_fail():
    assert violations("models", "def f():\n    from slipstream.training import loop\n") == {
        "training"
    }
    assert violations("data", "import slipstream.ops.native") == {"ops"}


def test_no_file_grows_beyond_500_lines():
    assert not [str(p) for p in ROOT.rglob("*.py") if len(p.read_text().splitlines()) > 500]
