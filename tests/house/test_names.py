"""One name for one thing: no module and no public class is called like another one."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "slipstream"


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("__")]


def repeated(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in more than one place."""
    places = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def public_classes(path: Path) -> list[str]:
    body = ast.parse(path.read_text()).body
    return [
        node.name
        for node in body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_no_module_name_stands_twice():
    rooms = [
        (path.parent.name, str(path.parent.relative_to(PACKAGE)))
        for path in sorted(PACKAGE.glob("*/__init__.py"))
    ]
    named = [(path.stem, str(path.relative_to(PACKAGE))) for path in modules()]
    assert not repeated(rooms + named)


def test_no_public_class_name_stands_twice():
    named = [
        (name, str(path.relative_to(PACKAGE)))
        for path in modules()
        for name in public_classes(path)
    ]
    assert not repeated(named)


def test_the_check_can_fail():
    assert repeated([("config", "a"), ("config", "b"), ("run", "a")]) == {"config": ["a", "b"]}
