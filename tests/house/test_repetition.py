"""No six equal lines stand twice in the sources, the tests or the kernels."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 6
THIN = re.compile(r"^[\W_]*$|^(else|try|finally|return|pass|None)\b\W*$")


def python_lines(source: str) -> list[tuple[int, str]]:
    """Lines that hold logic: no imports, signatures, docstrings, comments or lone brackets."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            left_out |= set(range(first, node.body[0].lineno))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    numbered = enumerate(source.splitlines(), 1)
    return [(n, line.strip()) for n, line in numbered if n not in left_out and counts(line)]


def counts(line: str) -> bool:
    """Whether a line says something of its own."""
    stripped = line.strip().partition("  # ")[0]
    return not THIN.match(stripped) and not stripped.startswith(("#", "//", "@pytest"))


def other_lines(source: str) -> list[tuple[int, str]]:
    """The same for C++, whose signatures are told by eye."""
    return [(n, line.strip()) for n, line in enumerate(source.splitlines(), 1) if counts(line)]


def repetitions(files: dict[str, str]) -> list[str]:
    """Pairs of places that share a run of six lines, each run told once."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, source in files.items():
        lines = python_lines(source) if name.endswith(".py") else other_lines(source)
        for start in range(len(lines) - LENGTH + 1):
            run = tuple(text for _, text in lines[start : start + LENGTH])
            places[run].append((name, lines[start][0]))
    found: dict[tuple[str, str], str] = {}
    for where in places.values():
        if len(where) > 1:
            (a, line_a), (b, line_b) = where[:2]
            found.setdefault((a, b), f"{a}:{line_a} ~ {b}:{line_b}")
    return sorted(found.values())


def test_no_six_equal_lines_stand_twice():
    paths = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("native/*.[ch]*")]
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}
    assert not repetitions(files)


def test_the_check_can_fail():
    body = "\n".join(f"    x{n} = compute({n})" for n in range(6))
    assert repetitions({"a.py": f"def f():\n{body}\n", "b.py": f"def g():\n{body}\n"})
    assert not repetitions(
        {"a.py": "def f(\n    a,\n    b,\n    c,\n    d,\n    e,\n    f,\n): ...\n" * 2}
    )
