"""A log that is the answer of an SQL query, run by DuckDB.

Touch this to ask another database. The answer goes batch by batch into a Parquet file in the
scratch folder, because a log is read more than once.
"""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet

from slipstream.data.log_files import LogTable
from slipstream.errors import SlipstreamError


def query_table(sql: str, database: Path | None, scratch: Path) -> LogTable:
    """Run a query, in a database file or over the files that it names, and open its answer."""
    try:
        import duckdb
    except ImportError as error:
        raise SlipstreamError(
            'an SQL query needs DuckDB; install it with `pip install "slipstream[sql]"`'
        ) from error
    if database is not None and not database.is_file():
        raise SlipstreamError(f"--database {database} does not exist")
    target = scratch / "query.parquet"
    try:
        where = ":memory:" if database is None else str(database)
        with duckdb.connect(where, read_only=database is not None) as connection:
            _write(connection.sql(sql), target)
    except (duckdb.Error, pa.ArrowException) as error:
        reason = (str(error).strip().splitlines() or ["unknown reason"])[0]
        raise SlipstreamError(f"the SQL query failed: {reason}") from error
    return LogTable(pl.scan_parquet(target), "the SQL query")


def _write(answer: Any, target: Path) -> None:
    if answer is None:
        raise SlipstreamError("the SQL query gives no rows; write one that begins with `select`")
    batches = pa.RecordBatchReader.from_stream(answer)
    with pyarrow.parquet.ParquetWriter(target, batches.schema, compression="lz4") as writer:
        for batch in batches:
            writer.write_batch(batch)
