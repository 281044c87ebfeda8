"""What the samples of a contest add up to: rows, claims, tables, the recorded file, the pages."""

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import evidence
from benchmarks.arena import report
from benchmarks.arena.evidence_tables import ARENA_TABLES
from benchmarks.arena.summary import make_claims, make_rows
from slipstream.errors import SlipstreamError
from tests.support.arena_entries import entry_of


def test_claims_compare_time_and_memory_with_rectools():
    entries = [
        entry_of("rectools-hstu", [(100.0, 0.10), (200.0, 0.18)], 0.17, 2.0),
        entry_of("slipstream-hstu", [(2.0, 0.12), (4.0, 0.18), (6.0, 0.19)], 0.19, 0.5),
        entry_of("slipstream-hstu-large", [(20.0, 0.15), (40.0, 0.21)], 0.20, 0.8),
        entry_of("slipstream-default", [(3.0, 0.10)], 0.16, 0.4),
    ]
    claims = make_claims(make_rows(entries))
    assert claims["time_vs_rectools_ml1m"] == pytest.approx(4.0 / 200.0)
    assert claims["memory_vs_rectools_ml1m"] == pytest.approx(0.25)
    frugal = entry_of("rectools-hstu-malloc", [(300.0, 0.10)], 0.10, 1.0)
    assert make_claims(make_rows([*entries, frugal]))["memory_vs_rectools_ml1m"] == 0.5
    assert claims["ndcg_ml1m"] == 0.16 and claims["ndcg_ml1m_best_peer"] == 0.17
    assert claims["ndcg10_ml1m"] == 0.20 and claims["ndcg10_ml1m_no_time"] == 0.16
    assert claims["first_time_ml1m"] == claims["first_p99_ml1m"] == 1.0
    assert not make_rows([replace(entries[0], timed=False)])[0]["request_time"]
    rows = {row["variant"]: row for row in make_rows(entries)}
    assert rows["slipstream-default"]["seconds_to_quality"] is None


def test_tables_fit_into_80_columns_and_pictures_are_drawn(tmp_path):
    entries = [
        entry_of("rectools-hstu-no-time", [(1000.0, 0.10), (1800.0, 0.18)], 0.1234, 12.0),
        entry_of("slipstream-hstu-large", [(2.0, 0.2)], 0.2164, 0.5),
    ]
    rows = make_rows(entries)
    result = report.make_result(rows, make_claims(rows), 2, 30.0)
    console = Console(record=True, width=report.WIDTH)
    report.show(result, console)
    shown = console.export_text()
    assert "…" not in shown and all(len(line) <= 80 for line in shown.splitlines())
    assert ".2164" in shown and "30.0m" in shown and "slipstream-hstu-large*" in shown
    report.draw(result, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_is_read_as_it_was_written(tmp_path):
    rows = make_rows([entry_of("slipstream-default", [(3.0, 0.10)], 0.16, 0.4)])
    result = report.make_result(rows, make_claims(rows), 2, 30.0)
    report.write_result(result, tmp_path / "arena.json")
    assert report.read_recorded(tmp_path / "arena.json") == result
    with pytest.raises(SlipstreamError, match="no contest is recorded"):
        report.read_recorded(tmp_path / "other.json")


def test_rows_that_are_recorded_stay_until_their_contender_is_run_again():
    peer = entry_of("rectools-sasrec", [(3.0, 0.10)], 0.16, 0.4)
    first = make_rows([peer], when="first")
    ours = entry_of("slipstream-default", [(1.0, 0.08), (2.0, 0.11)], 0.17, 0.4)
    rows = make_rows([ours], first, when="second")
    assert [(row["variant"], row["when"]) for row in rows] == [
        ("rectools-sasrec", "first"),
        ("slipstream-default", "second"),
    ]
    assert rows[1]["seconds_to_quality"] == 2.0  # against the recorded peer
    better = entry_of("rectools-sasrec", [(3.0, 0.2)], 0.26, 0.4)
    again = make_rows([better], rows, when="third")
    assert [row["when"] for row in again] == ["third", "second"]
    assert again[0]["NDCG@10"] == 0.26 and again[1]["seconds_to_quality"] is None


def test_pages_take_their_tables_from_a_recorded_contest(tmp_path, monkeypatch):
    failed = replace(entry_of("cornac-sasrec", [(9.0, 0.1)], 0.1, 1.0), samples=(), failure="late")
    entries = [
        entry_of("rectools-hstu", [(100.0, 0.10), (200.0, 0.18)], 0.17, 2.0),
        entry_of("slipstream-hstu", [(2.0, 0.12), (4.0, 0.18)], 0.19, 0.5),
        entry_of("slipstream-default", [(3.0, 0.10)], 0.16, 0.4),
        failed,
    ]
    rows = make_rows(entries)
    result = report.make_result(rows, make_claims(rows), 2, 30.0)
    report.write_result(result, tmp_path / "arena.json")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    assert "first_p99_ml1m" not in make_claims(rows[:1])  # nobody of ours took part
    text = "\n".join(ARENA_TABLES["arena-ml-1m"].lines())
    assert "| **slipstream-hstu** | yes | 0.1900 | 0.1900 |" in text
    assert "| cornac-sasrec |  |  |  |  | failed |" in text and "| - |" in text
    claims = "\n".join(ARENA_TABLES["arena-claims"].lines())
    assert "0.020 | at most 0.033 |" in claims


def test_a_table_names_the_commands_that_made_its_rows(tmp_path, monkeypatch):
    origin = report.origin(2, 30.0)
    peer = entry_of("rectools-hstu", [(100.0, 0.10)], 0.17, 2.0)
    ours = entry_of("slipstream-hstu", [(2.0, 0.12)], 0.19, 0.5)
    recorded = make_rows([peer], **{**origin, "command": "first command"})
    rows = make_rows([ours], recorded, **{**origin, "command": "second command"})
    report.write_result(report.make_result(rows, {}, 2, 30.0), tmp_path / "arena.json")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    last = "\n".join(ARENA_TABLES["arena-ml-1m"].lines())
    assert last.index("`first command`") < last.index("`second command`")
