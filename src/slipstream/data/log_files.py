"""Opens tables as people have them: CSV, JSON lines, Parquet, many files, or a frame in memory.

Touch this to read another format. A table is scanned, not read: only headers and schemas are looked
at here. The separator of a CSV is found in its header.
"""

import contextlib
import csv
import difflib
import glob
import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from slipstream.errors import SlipstreamError, did_you_mean

KINDS = {
    "CSV": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "Parquet": (".parquet", ".pq"),
    "JSON lines": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"),
}
SUFFIXES = tuple(suffix for several in KINDS.values() for suffix in several)
SEPARATORS = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}
HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class LogTable:
    """A table that is not read yet, and what was found out about it."""

    frame: pl.LazyFrame
    label: str  # how messages call it
    untyped: bool = False  # as in CSV: every column is text
    paths: tuple[Path, ...] = ()
    separator: str | None = None

    def require(self, name: str, role: str) -> None:
        """Raise unless there is a column `name`."""
        with explain_polars_errors(self.label):
            known = self.frame.collect_schema().names()
        if name not in known:
            raise SlipstreamError(
                f"{self.label} has no column '{name}' for the {role}{did_you_mean(name, known)}"
            )

    def place(self, row: int) -> str:
        """Name a row, the first being 1: in one of several files, by the file and its own row."""
        if len(self.paths) < 2:
            return f"row {row}"
        for path in self.paths:
            scanned = _scan([path], _kind(path), self.separator)
            rows = int(scanned.select(pl.len()).collect(engine="streaming").item())
            if row <= rows:
                return f"row {row} of {path.name}"
            row -= rows
        return f"row {row} after the last file"


@contextlib.contextmanager
def explain_polars_errors(what: Any) -> Iterator[None]:
    """Turn the errors of Polars about an unreadable file into a SlipstreamError."""
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise SlipstreamError(f"{what} is empty: there is nothing to prepare") from error
    except (pl.exceptions.PolarsError, FileNotFoundError, UnicodeDecodeError) as error:
        first_line = (str(error).strip().splitlines() or ["unknown reason"])[0]
        if "utf-8" in first_line.lower():
            first_line = "its text is not UTF-8; save it as UTF-8"
        raise SlipstreamError(f"{what} could not be read: {first_line}") from error


def is_frame(source: Any) -> bool:
    """Whether this is a table in memory: of Polars, pandas or Arrow."""
    from_pandas = type(source).__module__.split(".")[0] == "pandas"
    polars = isinstance(source, pl.DataFrame | pl.LazyFrame)
    return polars or from_pandas or hasattr(source, "__arrow_c_stream__")


def open_frame(source: Any) -> LogTable:
    """Open a Polars frame, a pandas data frame or an Arrow table."""
    if isinstance(source, pl.LazyFrame):
        return LogTable(source, "the lazy frame")
    if not isinstance(source, pl.DataFrame):
        try:
            source = pl.DataFrame(source)
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise SlipstreamError(f"the data frame could not be read: {error}") from error
    return LogTable(source.lazy(), "the data frame")


def open_files(given: Sequence[str | os.PathLike[str]], wanted: Iterable[str] = ()) -> LogTable:
    """Open files, folders and patterns as one table; `wanted` columns help to find a separator."""
    paths = expand_paths(given)
    label = paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
    kinds = {_kind(path) for path in paths}
    if len(kinds) != 1:
        raise SlipstreamError(
            f"the files mix {' and '.join(sorted(kinds))}; give files of one kind at a time"
        )
    kind, wanted = kinds.pop(), list(wanted)
    for path in paths:
        if path.stat().st_size == 0:
            raise SlipstreamError(f"{path.name} is empty: there is nothing to prepare")
    found = {find_separator(path, wanted) for path in paths} if kind == "CSV" else {None}
    if len(found) != 1:
        raise SlipstreamError(
            f"the files have different separators ({', '.join(sorted(map(repr, found)))}); prepare "
            "them with one separator"
        )
    separator = found.pop()
    with explain_polars_errors(label):
        frame = _same_columns(paths, kind, separator, wanted)
        found_names = frame.collect_schema().names()
    for name in wanted:
        if kind == "CSV" and f"{name}_duplicated_0" in found_names:
            raise SlipstreamError(f"{label} has two columns '{name}'; rename or drop one of them")
    return LogTable(frame, label, kind == "CSV", tuple(paths), separator)


def expand_paths(given: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that paths, folders and patterns name, each once, by name in a folder."""
    found: dict[Path, Path] = {}
    for each in given:
        path = Path(each)
        if path.is_dir():
            several = _tables_in(path)
        elif path.exists():
            several = [path]
        elif glob.has_magic(str(each)):
            several = [Path(name) for name in sorted(glob.glob(str(each), recursive=True))]
            several = [file for match in several for file in _files_of(match)]
            if not several:
                raise SlipstreamError(f"no file matches '{each}'; check the pattern and its folder")
        else:
            beside = [near.name for near in path.parent.glob("*")][:1_000]
            near = difflib.get_close_matches(path.name, beside, n=1)
            hint = f"; did you mean '{path.with_name(near[0])}'?" if near else ""
            raise SlipstreamError(f"{path} does not exist{hint}")
        for file in several:
            _kind(file)
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _files_of(match: Path) -> list[Path]:
    return _tables_in(match) if match.is_dir() else [match]


def _tables_in(folder: Path) -> list[Path]:
    """Return the tables in a folder; where it has none of its own, those of the folders below."""
    for pattern in ("*", "**/*"):
        found = sorted(
            path
            for path in folder.glob(pattern)
            if path.name.endswith(SUFFIXES) and not path.name.startswith((".", "_"))
        )
        if found:
            return found
    raise SlipstreamError(f"{folder} holds no CSV, Parquet or JSON lines file")


def _kind(path: Path) -> str:
    for kind, suffixes in KINDS.items():
        if path.name.lower().endswith(suffixes):
            return kind
    raise SlipstreamError(
        f"{path} is neither CSV nor Parquet nor JSON lines ({', '.join(SUFFIXES)}); convert it "
        "first"
    )


def find_separator(path: Path, wanted: Iterable[str]) -> str:
    """Return the separator that splits the header into the most wanted names, then the most."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            head = file.read(HEADER_BYTES)
    except (OSError, EOFError) as error:
        raise SlipstreamError(f"{path.name} could not be read: {error}") from error
    lines = head.decode("utf-8-sig", errors="replace").splitlines() or [""]
    wanted = set(wanted)

    def score(separator: str) -> tuple[int, int]:
        fields = next(csv.reader([lines[0]], delimiter=separator), [])
        return len(wanted & set(fields)), len(fields)

    return max(SEPARATORS, key=score)  # the first of equals: the comma


def _scan(paths: Sequence[Path], kind: str, separator: str | None) -> pl.LazyFrame:
    if kind == "Parquet":
        return pl.scan_parquet(list(paths))
    if kind == "JSON lines":  # all of it decides the types, so that no value is lost
        return pl.scan_ndjson(list(paths), infer_schema_length=None)
    return pl.scan_csv(list(paths), infer_schema=False, separator=separator or ",")


def _same_columns(
    paths: Sequence[Path], kind: str, separator: str | None, wanted: Sequence[str]
) -> pl.LazyFrame:
    """Scan all files; where their columns differ, those that all of them have."""
    if len(paths) == 1:
        return _scan(paths, kind, separator)
    frames = [_scan([path], kind, separator) for path in paths]
    schemas = [frame.collect_schema() for frame in frames]
    if all(list(schema.items()) == list(schemas[0].items()) for schema in schemas):
        return _scan(paths, kind, separator) if kind != "JSON lines" else pl.concat(frames)
    if kind == "JSON lines":
        return pl.concat(frames, how="diagonal_relaxed")
    everywhere = [name for name in schemas[0] if all(name in schema for schema in schemas)]
    for name in wanted:
        lacking = [path for path, schema in zip(paths, schemas, strict=True) if name not in schema]
        if lacking and len(lacking) < len(paths):
            raise SlipstreamError(
                f"{lacking[0].name} has no column '{name}', which other files have; give files of "
                "the same columns"
            )
    return pl.concat([frame.select(everywhere) for frame in frames], how="vertical_relaxed")


def scan_files(paths: Sequence[Path], **csv_options: Any) -> pl.LazyFrame:
    """Scan the CSV or Parquet files of a known data set, in the order given; CSV is text."""
    kinds = {"parquet" if path.suffix in (".parquet", ".pq") else "csv" for path in paths}
    if len(kinds) != 1:
        raise SlipstreamError(f"{paths[0].parent} mixes CSV and Parquet logs; keep one kind")
    for path in paths:
        if not path.is_file():
            raise SlipstreamError(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise SlipstreamError(f"{path} is empty: there is nothing to prepare")
    with explain_polars_errors(paths[0]):
        if kinds == {"parquet"}:
            return pl.scan_parquet(list(paths))
        return pl.scan_csv(list(paths), infer_schema=False, **csv_options)
