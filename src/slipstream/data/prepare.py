"""`prepare`: a known data set, or a log of one's own, becomes a sequence store. Whole or not at
all.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from slipstream.data.raw_log import Columns, RawLog, polars_errors_are_sentences, scan_files
from slipstream.data.store import ITEMS, META, SEQUENCES, USERS, SequenceStore
from slipstream.data.synthetic import Synthetic, synthetic_log
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.files import atomic_directory

Progress = Callable[[str, int, int], None]
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
TABLES = (".csv", ".csv.gz", ".parquet", ".pq")


@dataclass(frozen=True)
class Choices:
    """Everything that can be chosen besides the name; a filter left as None is the data set's own."""

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
    """Prepare the data set `name` of the catalogue, or the log at the path `name`, into the
    directory `out`, and open it.
    """
    choices, out = choices or Choices(), Path(out)
    say = progress or (lambda what, done, total: None)
    if choices.order != ORDER:
        raise SlipstreamError(
            f"unknown order '{choices.order}'; the one order is '{ORDER}': by time, equal times "
            "in file order"
        )
    _check_output(out, force)
    known = ENTRIES.get(str(name))
    with _scratch_beside(out) as scratch:
        log = _open_log(str(name), choices, scratch, say)
        base = known.filters if known else Filters()
        given = {
            key: getattr(choices, key) for key in ("min_item_count", "min_user_count", "k_core")
        }
        filters = replace(base, **{key: value for key, value in given.items() if value is not None})
        log = replace(
            log,
            source={"name": str(name) if known or str(name) == "synthetic" else Path(name).name}
            | log.source,
        )
        with atomic_directory(out) as directory:
            ingest(log, directory, filters, progress=say)
    return SequenceStore.open(out)


def _check_output(out: Path, force: bool) -> None:
    """Only a store of ours is ever replaced, and only when asked to."""
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
def _scratch_beside(out: Path) -> Iterator[Path]:
    """A working folder on the disk of the result, gone afterwards whatever happens; a failing disk
    or reader is one sentence.
    """
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


def _open_log(name: str, choices: Choices, scratch: Path, say: Progress) -> RawLog:
    if name == "synthetic":
        return synthetic_log(choices.synthetic, scratch, say)
    if name in ENTRIES:
        return _open_known(name, choices, scratch, say)
    path = Path(name)
    if path.exists():
        return own_log(_tables_in(path), choices.columns, choices.time_unit)
    raise SlipstreamError(f"there is no data set and no file '{name}'{did_you_mean(name, NAMES)}")


def _open_known(name: str, choices: Choices, scratch: Path, say: Progress) -> RawLog:
    entry, remote = ENTRIES[name], remote_of(name, choices.category)
    source = choices.source
    if source is None:
        source = fetch(remote, say)
    elif not source.exists():
        raise SlipstreamError(f"--source {source} does not exist")
    facts: dict[str, Any] = {"path": source.name, "terms": entry.terms}
    if source.is_file():
        facts |= _checked(
            source,
            remote.md5
            if source.name == remote.file_name or source.name.endswith(ARCHIVES)
            else None,
        )
    root = source
    if source.name.endswith(ARCHIVES):
        say(f"unpacking {source.name}", 0, 0)
        root = scratch / "unpacked"
        root.mkdir()
        _unpack(source, root)
    elif source.is_file() and name != "amazon-reviews":
        root = source.parent
    with polars_errors_are_sentences(source):
        log = entry.read(root)
    return replace(log, source=facts | log.source)


def _unpack(source: Path, root: Path) -> None:
    try:
        extract(source, root)
    except (SlipstreamError, OSError):
        if source.is_relative_to(cache_directory()):
            source.unlink(missing_ok=True)  # a damaged download must not be found again
        raise


def _checked(source: Path, md5: str | None) -> dict[str, Any]:
    """The md5 of a file for the record; where it is known it has to agree, unless the archive
    itself is broken (said then).
    """
    found = md5_of(source)
    if md5 is not None and found != md5:
        require_whole(source)
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
    """A user's own CSV or Parquet files as one log, in the order of their names; titles come from
    the log itself.
    """
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
