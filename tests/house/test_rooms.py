"""Imports point one way: a room knows only what the table in docs/architecture.md lets it know."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "slipstream"
SHARED = {
    "errors",
    "files",
    "interrupts",
    "bundle",
    "config",
    "display",
    "progress",
    "config_words",
    "machine",
    "uncached_files",
    "_lazy",
    "__version__",
}  # every room uses them


def room_table(markdown: str) -> dict[str, set[str]]:
    """Room -> rooms it may know, as the first table of the page says."""
    allowed: dict[str, set[str]] = {}
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 3:
            continue
        rooms = re.findall(r"`(\w+)/`", cells[0])
        known = set(re.findall(r"`(\w+)/?`", cells[2]))
        if "all above" in cells[2]:
            known |= set(allowed)
        elif cells[2].startswith("all") or "public APIs" in cells[2]:
            known = {"*"}
        allowed |= dict.fromkeys(rooms, known)
    return allowed


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
        rooms |= (
            {"benchmarks"} if any(name.split(".")[0] == "benchmarks" for name in names) else set()
        )
    return rooms


def violations(room: str, source: str, allowed: dict[str, set[str]]) -> set[str]:
    """What a module of `room` imports and may not."""
    imported = imported_rooms(source)
    if "*" in allowed[room]:
        return imported & {"benchmarks"}
    return imported - allowed[room] - SHARED - {room}


def documented() -> dict[str, set[str]]:
    return room_table((ROOT / "docs" / "architecture.md").read_text())


def test_every_room_stands_in_the_table_and_every_line_has_its_room():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(documented())


def test_no_room_knows_what_it_may_not():
    allowed = documented()
    found = {
        str(path.relative_to(PACKAGE)): bad
        for room in allowed
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if (bad := violations(room, path.read_text(), allowed))
    }
    assert not found


def test_the_check_can_fail():
    allowed = {"models": {"ops"}, "data": set(), "cli": {"*"}}
    assert violations("models", "def f():\n    from slipstream.training import loop\n", allowed)
    assert violations("data", "import slipstream.ops.native", allowed) == {"ops"}
    assert violations("cli", "from benchmarks import serving", allowed) == {"benchmarks"}
    assert room_table("| `a/`, `b/` | x | `c` |\n| `d/` | y | all above, torch |") == {
        "a": {"c"},
        "b": {"c"},
        "d": {"a", "b"},
    }


def test_no_file_grows_beyond_500_lines():
    places = (PACKAGE, ROOT / "tests", ROOT / "benchmarks")
    long = [
        p for place in places for p in place.rglob("*.py") if len(p.read_text().splitlines()) > 500
    ]
    assert not long
