"""`prepare`: turns a known data set, or a user's own log, into a sequence store.

Touch this when data comes from somewhere else. A store is written whole or not at all.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from slipstream.data.catalogue import ENTRIES, NAMES, remote_of
from slipstream.data.choices import Choices, TableSource
from slipstream.data.download import (
    cache_directory,
    extract,
    fetch,
    md5_of,
    require_whole,
    wrong_md5,
)
from slipstream.data.ingest import Filters, ingest
from slipstream.data.item_vectors import write_item_vectors
from slipstream.data.log_files import expand_paths, explain_polars_errors
from slipstream.data.own_log import log_columns, open_own_log, open_table, paths_of
from slipstream.data.raw_log import Progress, RawLog
from slipstream.data.sql_query import query_table
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import synthetic_log
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.files import atomic_directory, check_output

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")


def prepare(
    data: TableSource | None,
    out: str | os.PathLike[str],
    choices: Choices | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> SequenceStore:
    """Prepare a data set of the catalogue, or a log of your own, into `out`; open it.

    A log is a path, several of them, or a frame of Polars, pandas or Arrow; None if `choices` has
    an SQL query.
    """
    choices, out = choices or Choices(), Path(out)
    report = progress or (lambda what, done, total: None)
    _check_source(data, choices)
    check_output(out, "store", force=force, inputs=_inputs(data, choices))
    known = ENTRIES.get(str(data)) if isinstance(data, str | os.PathLike) else None
    with scratch_next_to(out) as scratch:
        log = _open_log(data, choices, scratch, report)
        base = known.filters if known else Filters()
        given = {
            key: getattr(choices, key) for key in ("min_item_count", "min_user_count", "k_core")
        }
        filters = replace(base, **{key: value for key, value in given.items() if value is not None})
        with atomic_directory(out) as directory:
            ingest(log, directory, filters, progress=report)
            if choices.item_vectors:
                write_item_vectors(directory, choices.item_vectors, _vector_ids(choices))
    return SequenceStore.open(out)


def _vector_ids(choices: Choices) -> str:
    """Return the name that the column of item ids has in tables of items."""
    named = None if choices.items is None else choices.items.id
    return named or choices.columns.item


def _is_name(data: TableSource | None) -> bool:
    return isinstance(data, str | os.PathLike) and str(data) in NAMES


def _check_source(data: TableSource | None, choices: Choices) -> None:
    """Raise unless there is one source, and it is there."""
    if (data is None) == (choices.sql is None):
        raise SlipstreamError("give a data set, a log or a query (--sql), and only one of them")
    if _is_name(data):
        own = (choices.items, choices.users, choices.action_values)
        if any(each is not None for each in own) or choices.columns.context:
            raise SlipstreamError(
                f"'{data}' is a known data set; features, action values and context are chosen for "
                "a log of your own only"
            )
    elif isinstance(data, str) and not Path(data).exists() and not any(c in data for c in "*?[/."):
        raise SlipstreamError(
            f"there is no data set and no file '{data}'{did_you_mean(data, NAMES)}"
        )


def _inputs(data: TableSource | None, choices: Choices) -> list[Path]:
    """Return the files that are read, which no output may replace."""
    if _is_name(data):
        return [choices.source] if choices.source is not None else []
    found = [choices.database] if choices.database is not None else []
    sources = [data, *(each.data for each in (choices.items, choices.users) if each is not None)]
    for source in sources:
        found += expand_paths(paths_of(source)) if source is not None else []
    return found


@contextlib.contextmanager
def scratch_next_to(out: Path) -> Iterator[Path]:
    """Make a temporary folder on the disk of `out`; failures of disk or reader are explained."""
    absent = [folder for folder in out.parents if not folder.exists()]
    whole = False
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.scratch.", dir=out.parent) as scratch:
            yield Path(scratch)
        whole = True
    except OSError as error:
        raise SlipstreamError(
            f"could not prepare {out}: {error.strerror or error}; nothing was left behind"
        ) from error
    except pl.exceptions.PolarsError as error:
        raise SlipstreamError(
            f"could not prepare {out}: {str(error).splitlines()[0]}; nothing was left behind"
        ) from error
    finally:
        for folder in () if whole else absent:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _open_log(
    data: TableSource | None, choices: Choices, scratch: Path, report: Progress
) -> RawLog:
    if choices.sql is not None:
        report("running the query", 0, 0)
        return open_own_log(query_table(choices.sql, choices.database, scratch), choices)
    if not _is_name(data):
        return open_own_log(open_table(data, log_columns(choices)), choices)
    name = str(data)
    log = (
        synthetic_log(choices.synthetic, scratch, report)
        if name == "synthetic"
        else _open_known(name, choices, scratch, report)
    )
    return replace(
        log,
        source={"name": name} | log.source,
        nulls=choices.nulls or log.nulls,
        duplicates=choices.duplicates or log.duplicates,
    )


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
