"""Writes every measured table of README and docs from benchmarks/results.

    python -m benchmarks.evidence            # write the tables
    python -m benchmarks.evidence --check    # name the pages that differ from the results, exit 1

A page marks the place of a table by `<!-- evidence: NAME -->` and `<!-- end of evidence -->`. What
NAME shows is declared in evidence_tables.py, which joins them. Where no result is recorded
yet, a table says so and names the command. Touch this when a table is written in another way.
"""

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run_function
from benchmarks.evidence_plan import BENCHMARKS
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
WIDTH = 120  # columns of prose
PLACE = re.compile(r"(<!-- evidence: ([\w-]+) -->\n).*?(<!-- end of evidence -->)", re.DOTALL)

Result = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the field of a result's row, how it is written.

    A field may be a function of the row.
    """

    heading: str
    field: str | Callable[[dict[str, Any]], Any]
    form: str = ""
    scale: float = 1.0


@dataclass(frozen=True)
class RowTable:
    """Rows of one result; `keep` chooses among them, `published` rows of others come first."""

    bench: str
    columns: Sequence[Column]
    keep: Callable[[dict[str, Any]], bool] = lambda row: True
    published: Sequence[dict[str, Any]] = ()

    def lines(self) -> list[str]:
        """Return the table in Markdown, with its source below."""
        if not is_recorded(self.bench):
            return [f"Not recorded yet: `{planned_command(self.bench)}`."]
        result = read_result(self.bench)
        kept = [row for row in result["rows"] if self.keep(row)]
        if not kept:
            return [f"Not recorded yet: `{planned_command(self.bench)}`."]
        rows = [[_cell(row, column) for column in self.columns] for row in (*self.published, *kept)]
        ruler = ["---", *("--:" for _ in self.columns[1:])]
        head = [column.heading for column in self.columns]
        # Rows that several commands made say themselves where they come from.
        own = dict.fromkeys(source(row) for row in kept if "commit" in row)
        sources = textwrap.wrap(" ".join(own) or source(result), WIDTH, break_on_hyphens=False)
        return [*(_line(cells) for cells in (head, ruler, *rows)), "", *sources]


@dataclass(frozen=True)
class Claim:
    """A headline figure of a result, what it means, and the bar it is held against.

    `bar` is the least allowed value, or the most where `at_most`. A result that is made `in_parts`
    may lack the claim until its part is there.
    """

    text: str
    bench: str
    name: str
    form: str = ".2f"
    scale: float = 1.0
    unit: str = ""
    bar: float | None = None
    at_most: bool = False
    in_parts: bool = False

    def cells(self) -> list[str]:
        """Return text, figure, bar and command."""
        missing = [self.text, "not recorded", self._bar(), f"`{planned_command(self.bench)}`"]
        if not is_recorded(self.bench):
            return missing
        result = read_result(self.bench)
        if self.name not in result["claims"]:
            if self.in_parts:
                return missing
            raise SlipstreamError(f"results/{self.bench}.json has no claim '{self.name}'")
        value = result["claims"][self.name]
        return [self.text, self._written(value), self._verdict(value), f"`{command(result)}`"]

    def _written(self, value: float) -> str:
        return f"{value * self.scale:{self.form}}{self.unit}"

    def _bar(self) -> str:
        if self.bar is None:
            return ""
        return f"{'at most' if self.at_most else 'at least'} {self._written(self.bar)}"

    def _verdict(self, value: float) -> str:
        if self.bar is None:
            return ""
        met = value <= self.bar if self.at_most else value >= self.bar
        return self._bar() if met else f"{self._bar()}: **missed**"


@dataclass(frozen=True)
class ClaimTable:
    """Headline figures of any results; those that are not recorded may be left out."""

    claims: Sequence[Claim]
    only_recorded: bool = False

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        head = ["what", "figure", "bar", "command"]
        rows = [
            claim.cells()
            for claim in self.claims
            if is_recorded(claim.bench) or not self.only_recorded
        ]
        return [_line(cells) for cells in (head, ["---", "--:", "---", "---"], *rows)]


EvidenceTable = RowTable | ClaimTable


def is_recorded(bench: str) -> bool:
    """Whether there is a result of a benchmark."""
    return (RESULTS / f"{bench}.json").is_file()


def planned_command(bench: str) -> str:
    """Return the command that will make a result, as a reader types it."""
    planned = next((one for one in BENCHMARKS if one.name == bench), None)
    words = (f"benchmarks.{bench}",) if planned is None else planned.words
    command = " ".join(words)
    return command if words[0] == "slipstream" else f"python -m {command}"


def read_result(bench: str) -> Result:
    """Return a recorded result."""
    path = RESULTS / f"{bench}.json"
    if not path.is_file():
        raise SlipstreamError(
            f"no result of '{bench}' is recorded; run '{planned_command(bench)} --json "
            f"benchmarks/results/{bench}.json'"
        )
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def command(result: Result) -> str:
    """Return the command that made a result, as a reader types it."""
    told: str = result.get("command") or f"python -m benchmarks.{result['bench']}"
    return told


def source(result: Result) -> str:
    """Return the line that says where a table comes from."""
    machine, commit = result["machine"], result.get("commit")
    processor = machine.get("processor", "")
    cores = machine.get("cores", machine.get("cpus"))
    parts = [
        f"`{command(result)}`",
        f"{processor}, {cores} cores" if cores else str(processor),
        str(result["when"])[:10],
        *([f"commit {commit}"] if commit else []),
    ]
    return "; ".join(parts) + "."


def rewritten(text: str, tables: dict[str, EvidenceTable]) -> str:
    """Return a page with every marked table written anew."""

    def table(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in tables:
            raise SlipstreamError(f"no table '{name}' is declared in evidence_tables.py")
        return begin + "\n" + "\n".join(tables[name].lines()) + "\n\n" + end

    return PLACE.sub(table, text)


def pages() -> list[Path]:
    """Return the pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stale_pages() -> list[Path]:
    """Return the pages whose tables differ from the results."""
    from benchmarks.evidence_tables import TABLES

    return [page for page in pages() if rewritten(_read(page), TABLES) != _read(page)]


def write_tables(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; name what differs.")] = (
        False
    ),
) -> None:
    """Write every measured table of README and docs from benchmarks/results."""
    from benchmarks.evidence_tables import TABLES

    stale = stale_pages()
    if check and stale:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        raise SlipstreamError(f"{names} differ from benchmarks/results; run it without --check")
    for page in stale:
        text = rewritten(_read(page), TABLES)
        with atomic_file(page) as path:
            Path(path).write_text(text, encoding="utf-8")
        typer.echo(f"wrote {page.relative_to(ROOT)}")


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _cell(row: dict[str, Any], column: Column) -> str:
    value = row.get(column.field, "") if isinstance(column.field, str) else column.field(row)
    if value is None or value == "" or value != value:  # no number: not measured in this row
        return ""
    return f"{value * column.scale if column.scale != 1.0 else value:{column.form}}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    run_function(write_tables)
