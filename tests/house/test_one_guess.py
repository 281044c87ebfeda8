"""A newcomer finds a module's tests in one guess: tests/<room>/…/test_<module>.py.

Where another file holds them, tests/<room>/covered_elsewhere.txt says which and why, a line each:
`slipstream.ops.attention_native: tests/ops/test_attention.py: reason`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "slipstream"


def modules() -> dict[str, Path]:
    """Dotted name -> the test file one would guess."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name.startswith("__") or path.name == "_lazy.py":
            continue
        place = path.relative_to(PACKAGE)
        dotted = ".".join(["slipstream", *place.with_suffix("").parts])
        found[dotted] = ROOT / "tests" / place.parent / f"test_{place.name}"
    return found


def covered_elsewhere() -> dict[str, tuple[str, str]]:
    """Dotted name -> (test file, reason)."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("covered_elsewhere.txt")):
        for line in path.read_text().splitlines():
            if line.strip():
                module, test, reason = (part.strip() for part in line.split(":", 2))
                found[module] = (test, reason)
    return found


def test_every_module_has_its_test_file_or_says_where_its_tests_are():
    elsewhere = covered_elsewhere()
    missing = [
        name for name, path in modules().items() if not path.exists() and name not in elsewhere
    ]
    assert not missing


def test_what_is_listed_exists_and_needs_its_line():
    found = modules()
    for module, (test, reason) in covered_elsewhere().items():
        assert module in found, f"{module} does not exist any more"
        assert not found[module].exists(), f"{module} has its test file, so its line can go"
        assert (ROOT / test).exists(), f"{test}, named for {module}, does not exist"
        assert len(reason) > 10


def test_most_modules_are_found_at_the_first_guess():
    assert len(covered_elsewhere()) <= len(modules()) / 3
