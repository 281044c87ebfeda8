"""`prepare`: turns a known data set, or a user's own log, into a sequence store.

Touch this when there are new choices for preparing data. A store is written whole or not at all.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from slipstream.data.catalogue import ENTRIES, NAMES, remote_of
from slipstream.data.download import (
    cache_directory,
    extract,
    fetch,
    md5_of,
    require_whole,
    wrong_md5,
)
from slipstream.data.ingest import ORDER, Filters, ingest
from slipstream.data.raw_log import (
    Columns,
    Progress,
    RawLog,
    explain_polars_errors,
    scan_files,
)
from slipstream.data.store import ITEMS, META, SEQUENCES, USERS, SequenceStore
from slipstream.data.synthetic import Synthetic, synthetic_log
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.files import atomic_directory

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
TABLES = (".csv", ".csv.gz", ".parquet", ".pq")


@dataclass(frozen=True)
class Choices:
    """What can be chosen besides the name; a filter that is None is the data set's own."""

    source: Path | None = None
    columns: Columns = field(default_factory=lambda: Columns("user_id", "item_id", "timestamp"))
    time_unit: str = "s"
    order: str = ORDER
    min_item_count: int | None = None
    min_user_count: int | None = None
    k_core: int | None = None
    category: str = "All_Beauty"
    synthetic: Synthetic = field(default_factory=Synthetic)


def prepare(
    name: str | os.PathLike[str],
    out: str | os.PathLike[str],
    choices: Choices | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> SequenceStore:
    """Prepare a data set of the catalogue, or the log at the path `name`, into `out`; open it."""
    choices, out = choices or Choices(), Path(out)
    report = progress or (lambda what, done, total: None)
    if choices.order != ORDER:
        raise SlipstreamError(
            f"unknown order '{choices.order}'; the one order is '{ORDER}': by time, equal times "
            "in file order"
        )
    _check_output(out, force)
    known = ENTRIES.get(str(name))
    with _scratch_next_to(out) as scratch:
        log = _open_log(str(name), choices, scratch, report)
        base = known.filters if known else Filters()
        given = {
            key: getattr(choices, key) for key in ("min_item_count", "min_user_count", "k_core")
        }
        filters = replace(base, **{key: value for key, value in given.items() if value is not None})
        label = str(name) if known or str(name) == "synthetic" else Path(name).name
        log = replace(log, source={"name": label} | log.source)
        with atomic_directory(out) as directory:
            ingest(log, directory, filters, progress=report)
    return SequenceStore.open(out)


def _check_output(out: Path, force: bool) -> None:
    """Raise unless `out` is free, or a store that may be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise SlipstreamError(
            f"{out} is a file, but the store is a directory; choose another --out"
        )
    there = {path.name for path in out.iterdir()}
    if there and not force:
        raise SlipstreamError(
            f"{out} exists already; choose another --out, or pass --force to replace it"
        )
    foreign = sorted(there - {SEQUENCES, ITEMS, USERS, META, "inspect.png"})
    if foreign:
        raise SlipstreamError(
            f"{out} holds '{foreign[0]}', which is no part of a store, so it is not replaced; "
            "choose another --out"
        )


@contextlib.contextmanager
def _scratch_next_to(out: Path) -> Iterator[Path]:
    """Make a temporary folder on the disk of `out`; failures of disk or reader are explained."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.scratch.", dir=out.parent) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise SlipstreamError(
            f"could not prepare {out}: {error.strerror or error}; nothing was left behind"
        ) from error
    except pl.exceptions.PolarsError as error:
        raise SlipstreamError(
            f"could not prepare {out}: {str(error).splitlines()[0]}; nothing was left behind"
        ) from error


def _open_log(name: str, choices: Choices, scratch: Path, report: Progress) -> RawLog:
    if name == "synthetic":
        return synthetic_log(choices.synthetic, scratch, report)
    if name in ENTRIES:
        return _open_known(name, choices, scratch, report)
    path = Path(name)
    if path.exists():
        return own_log(_tables_in(path), choices.columns, choices.time_unit)
    raise SlipstreamError(f"there is no data set and no file '{name}'{did_you_mean(name, NAMES)}")


def _open_known(name: str, choices: Choices, scratch: Path, report: Progress) -> RawLog:
    entry, remote = ENTRIES[name], remote_of(name, choices.category)
    source = choices.source
    if source is None:
        source = fetch(remote, report)
    elif not source.exists():
        raise SlipstreamError(f"--source {source} does not exist")
    facts: dict[str, Any] = {"path": source.name, "terms": entry.terms}
    if source.is_file():
        is_archive = source.name == remote.file_name or source.name.endswith(ARCHIVES)
        facts |= _check_md5(source, remote.md5 if is_archive else None)
    root = source
    if source.name.endswith(ARCHIVES):
        report(f"unpacking {source.name}", 0, 0)
        root = scratch / "unpacked"
        root.mkdir()
        _unpack(source, root)
    elif source.is_file() and name != "amazon-reviews":
        root = source.parent
    with explain_polars_errors(source):
        log = entry.read(root)
    return replace(log, source=facts | log.source)


def _unpack(source: Path, root: Path) -> None:
    try:
        extract(source, root)
    except (SlipstreamError, OSError):
        if source.is_relative_to(cache_directory()):
            source.unlink(missing_ok=True)  # a damaged download must not be found again
        raise


def _check_md5(source: Path, md5: str | None) -> dict[str, Any]:
    """Return the md5 of a file for store.json; raise if it is not the known one."""
    found = md5_of(source)
    if md5 is not None and found != md5:
        require_whole(source)  # a damaged archive has an error of its own
        raise SlipstreamError(wrong_md5(source, found, md5))
    return {"md5": found, "md5_known": md5 is not None}


def _tables_in(path: Path) -> Sequence[Path]:
    if path.is_file():
        if path.name.endswith(TABLES) or path.stat().st_size == 0:
            return [path]
        raise SlipstreamError(
            f"{path} is neither CSV nor Parquet (.csv, .csv.gz, .parquet); convert it first"
        )
    found = sorted(child for child in path.iterdir() if child.name.endswith(TABLES))
    if not found:
        raise SlipstreamError(f"{path} holds no CSV or Parquet file")
    return found


def own_log(paths: Sequence[Path], columns: Columns, time_unit: str) -> RawLog:
    """Open a user's CSV or Parquet files as one log, in order of name; titles are in the log."""
    raw = scan_files(paths)
    source = {
        "path": str(paths[0].name),
        "files": len(paths),
        "columns": columns.__dict__ | {"actions": list(columns.actions)},
    }
    log = RawLog(
        raw, columns, time_unit=time_unit, source=source, untyped=".csv" in paths[0].suffixes
    )
    if columns.title is None:
        return log
    items = raw.select(
        id=pl.col(columns.item).cast(pl.String), title=pl.col(columns.title).cast(pl.String)
    ).unique("id", keep="first")
    return replace(log, items=items)
