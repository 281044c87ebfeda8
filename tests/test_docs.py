"""Docs and README agree with the tree: links, commands, benchmark modules, paths and recipe keys.

Touch this when a page quotes a new kind of thing that can go out of date.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest

from slipstream.training.recipe_reference import reference_page

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "slipstream"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GROUPS = (
    "bench",
    "client",
    "data",
    "history",
    "simulate",
)  # commands that have commands of their own
SECTIONS = "loss|model|optimizer|sampler|split|tables|train"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_blocks(text: str) -> list[str]:
    """Return the lines of indented code, each joined with its continuation lines."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.strip() for line in lines if re.match(r"\s{4,}\S", line)]


def inline_codes(text: str) -> list[str]:
    """Return what stands between single backticks."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose)]


def slipstream_commands(text: str) -> list[list[str]]:
    """Return the words after each quoted `slipstream`, without comments and assignments."""
    quoted = [
        code.split("-m ", 1)[1] if "-m slipstream " in code else code
        for code in code_blocks(text) + inline_codes(text)
    ]
    calls = [shlex.split(code.split(" #")[0]) for code in quoted if code.startswith("slipstream ")]
    return [words[1:] for words in calls if not words[1].startswith("-")]


def command_path(words: list[str]) -> list[str]:
    """Return the command's own words: `data prepare`, `train`; a placeholder NAME is left out."""
    path = words[:2] if words[0] in GROUPS else words[:1]
    return [word for word in path if word == word.lower() and not word.startswith("-")]


def declared_words() -> set[str]:
    """Return every string and function name in the command line's sources."""
    words: set[str] = set()
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.FunctionDef):
                words.add(node.name.replace("_", "-"))
    return words


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@each_page
def test_every_relative_link_resolves(page):
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@each_page
def test_every_quoted_command_is_declared(page):
    declared = declared_words()
    paths = [command_path(words) for words in slipstream_commands(page.read_text(encoding="utf-8"))]
    assert not [path for path in paths if not declared.issuperset(path)]


@each_page
def test_every_quoted_benchmark_exists(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"python -m\s+benchmarks\.([a-z]\w*)", text))
    folder = ROOT / "benchmarks"
    runnable = {
        name
        for name in names
        if (folder / f"{name}.py").is_file() or (folder / name / "__main__.py").is_file()
    }
    assert names == runnable


@each_page
def test_every_quoted_recipe_key_exists(page):
    reference = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `([\w.]+)` \|", reference, re.M))
    codes = [*code_blocks(text := page.read_text(encoding="utf-8")), *inline_codes(text)]
    quoted = {
        key
        for code in codes
        for key in re.findall(rf"(?<![\w./])(?:{SECTIONS})\.\w+(?=$|=| )", code)
    }
    assert quoted <= known


@each_page
def test_prose_has_at_most_132_columns(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 132 and not line.startswith("|")]


def test_every_page_is_linked_from_an_index():
    indices = [ROOT / "README.md", ROOT / "docs/README.md", ROOT / "docs/evidence/README.md"]
    linked = {
        (index.parent / link).resolve()
        for index in indices
        for link in re.findall(r"\]\(([^)#:]+)", index.read_text(encoding="utf-8"))
    }
    assert not [page for page in PAGES if page.resolve() not in linked | {indices[0].resolve()}]


def test_every_path_of_the_architecture_page_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = [line.split("planned")[0] for line in text.splitlines() if "| planned" not in line]
    codes = [code for line in lines for code in re.findall(r"`([^`]+)`", line)]
    paths = [code for code in codes if re.fullmatch(r"[\w./-]+(/|\.(py|md))", code)]
    paths = [path for path in paths if not path.startswith("_")]  # a suffix, as in `_native.py`
    places = (ROOT, PACKAGE, PACKAGE / "serving")
    assert len(paths) > 50
    assert not [path for path in paths if not any((place / path).exists() for place in places)]


def test_the_room_table_names_every_room_of_the_package():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## Rooms")[1].split("\nBeside")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = {room for cell in first_cells for room in re.findall(r"`(\w+)/`", cell)}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= named


def test_the_recipe_reference_is_what_the_script_writes():
    written = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    assert written == reference_page(), "run: python docs/make_recipe_reference.py"


@pytest.mark.system
def test_every_quoted_option_is_in_the_help_of_its_command(monkeypatch, capsys):
    from slipstream.cli.app import run_command

    monkeypatch.setenv("COLUMNS", "200")
    helps: dict[tuple[str, ...], str] = {}
    missing = []
    for page in PAGES:
        for words in slipstream_commands(page.read_text(encoding="utf-8")):
            path = tuple(command_path(words))
            if path not in helps:
                assert run_command([*path, "--help"]) == 0, f"{page}: slipstream {' '.join(path)}"
                helps[path] = capsys.readouterr().out
            if len(path) == (2 if words[0] in GROUPS else 1):
                options = [word for word in words if word.startswith("--")]
                missing += [(path, word) for word in options if word not in helps[path]]
    assert not missing
