"""Tables of README and docs are written from recorded results, and are those of the results."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.evidence import Claim, ClaimTable, Column, RowTable, rewritten, stale_pages
from benchmarks.evidence_tables import TABLES
from slipstream.errors import SlipstreamError

PAGE = "before\n<!-- evidence: demo -->\nold\n<!-- end of evidence -->\nafter\n"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recorded result, of a benchmark called demo."""
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    result = {
        "bench": "demo",
        "command": "python -m benchmarks.demo --part a",
        "commit": "abc1234",
        "when": "2026-01-02T03:04:05+00:00",
        "machine": {"processor": "P", "cores": 2},
        "rows": [{"variant": "x", "s": 0.0015}, {"variant": "y", "s": 1200.0, "odd": math.nan}],
        "claims": {"ratio": 1.5},
    }
    (tmp_path / "demo.json").write_text(json.dumps(result))


def test_every_page_shows_what_is_recorded():
    assert not stale_pages()


@pytest.mark.usefixtures("results")
def test_a_marked_table_is_written_from_the_rows():
    columns = (Column("v", "variant"), Column("ms", "s", ",.1f", 1e3), Column("odd", "odd"))
    table = RowTable("demo", columns)
    text = rewritten(PAGE, {"demo": table})
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| x | 1.5 |  |\n| y | 1,200,000.0 |  |" in text
    assert "`python -m benchmarks.demo --part a`; P, 2 cores; 2026-01-02; commit abc1234." in text
    assert rewritten(text, {"demo": table}) == text


@pytest.mark.usefixtures("results")
def test_a_claim_is_held_against_its_bar():
    held = Claim("faster", "demo", "ratio", ".1f", unit="x", bar=1.2)
    assert held.cells()[1:3] == ["1.5x", "at least 1.2x"]
    missed = Claim("smaller", "demo", "ratio", ".1f", bar=1.2, at_most=True)
    assert missed.cells()[2] == "at most 1.2: **missed**"
    assert "python -m benchmarks.demo" in ClaimTable([held]).lines()[2]


@pytest.mark.usefixtures("results")
def test_what_is_not_declared_is_named():
    with pytest.raises(SlipstreamError, match="no table 'demo'"):
        rewritten(PAGE, {})
    with pytest.raises(SlipstreamError, match="no claim 'speed'"):
        Claim("", "demo", "speed").cells()
    with pytest.raises(SlipstreamError, match="no result of 'other' is recorded"):
        evidence.read_result("other")


@pytest.mark.usefixtures("results")
def test_a_table_says_what_is_not_recorded_yet_and_how_to_record_it():
    assert RowTable("other", ()).lines() == ["Not recorded yet: `python -m benchmarks.other`."]
    bench = "train_step"  # a measurement of the package
    claim = Claim("faster", bench, "x", ".0f", bar=15, unit="x")
    cells = ["faster", "not recorded", "at least 15x", "`slipstream bench train-step`"]
    assert claim.cells() == cells
    part = Claim("later", "demo", "speed", in_parts=True)
    assert part.cells()[1] == "not recorded"
    none_kept = RowTable("demo", (), keep=lambda row: False)
    assert none_kept.lines() == ["Not recorded yet: `python -m benchmarks.demo`."]
    held = Claim("faster", "demo", "ratio")
    assert len(ClaimTable([held, claim]).lines()) == 4
    assert len(ClaimTable([held, claim], only_recorded=True).lines()) == 3


def test_every_declared_table_stands_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in evidence.pages())
    assert not [name for name in TABLES if f"<!-- evidence: {name} -->" not in text]
