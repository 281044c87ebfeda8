"""`slipstream history …`: fill a history store from prepared data, export it, forget users.

Touch this when a store of histories gets another command; the stores are in history/.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.console import Console

from slipstream.cli.data_commands import Ticker
from slipstream.data.splits import Split
from slipstream.data.store import SequenceStore, Vocabulary
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file
from slipstream.history.history_store import (
    HistoryStore,
    open_history_store,
    url_without_password,
)
from slipstream.history.user_history import History

Answer = TypeVar("Answer")
BATCH = 50_000  # behaviours of one transaction of an import, of one row group of an export
PAGE = 1_000  # users asked for at once
EVERYTHING = 1 << 40  # behaviours to read: all that are kept
LOG_COLUMNS = ("user_id", "item_id", "timestamp")  # as `slipstream data prepare` expects them

history = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Fill a history store from prepared data, export it, and forget users.",
)
console = Console(highlight=False, soft_wrap=True, markup=False)

Url = Annotated[
    str,
    typer.Option(
        "--history",
        help="History store: sqlite:PATH or redis://HOST:PORT/DB.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Until(StrEnum):
    """Which behaviours of prepared data are imported."""

    validation = "validation"
    test = "test"
    all = "all"


@history.command("import")
def import_command(
    store: Annotated[Path, typer.Argument(help="A store written by `slipstream data prepare`.")],
    url: Url,
    until: Annotated[
        Until,
        typer.Option(
            help="`all` behaviours, or those before the ones held out for validation or test."
        ),
    ] = Until.all,
    validation: Annotated[
        int, typer.Option(min=0, help="Behaviours held out for validation (split.validation).")
    ] = 1,
    test: Annotated[
        int, typer.Option(min=0, help="Behaviours held out for test (split.test).")
    ] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Replace users that have behaviours already.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import the behaviours of prepared data, so that trained users are known at once.

    Users and items keep their original ids. A user who has behaviours already is skipped.
    """
    data = SequenceStore.open(store)
    ends_U = _ends(data, until, Split(validation, test))
    with Ticker() as ticker:
        done = _on_store(url, lambda opened: _import(opened, data, ends_U, force, ticker))
    skipped = int((ends_U > 0).sum()) - done["users"]
    report = {**done, "skipped": skipped}
    words = f"{done['users']:,} users with {done['behaviours']:,} behaviours imported"
    if skipped:
        words += f"; {skipped:,} users have behaviours already and were skipped (--force replaces)"
    _show(report, f"{url_without_password(url)}: {words}", as_json)


@history.command("export")
def export_command(
    url: Url,
    out: Annotated[
        Path, typer.Option("--out", help="The file: .parquet or .jsonl.", show_default=False)
    ],
    user: Annotated[str | None, typer.Option(help="Export this user only.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the stored behaviours as a log that `slipstream data prepare` reads.

    One row per behaviour: user_id, item_id, timestamp, and a column per action.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise SlipstreamError(f"--out {out} must end with .parquet or .jsonl")
    if out.is_dir() or (out.exists() and not force):
        raise SlipstreamError(f"{out} exists already; give another --out, or --force to replace it")
    write = _write_parquet if out.suffix == ".parquet" else _write_lines

    async def work(store: HistoryStore) -> dict[str, int]:
        if user is not None and await store.read(user, 0) is None:
            raise SlipstreamError(f"nothing is stored of user '{user}'")
        with Ticker() as ticker, atomic_file(out) as path:
            return await write(store, user, path, ticker)

    done = _on_store(url, work, create=False)
    words = f"{out}: {done['behaviours']:,} behaviours of {done['users']:,} users"
    _show(done, words, as_json)


@history.command("delete")
def delete_command(
    users: Annotated[
        list[str], typer.Argument(help="Users to forget; after -- if an id begins with a minus.")
    ],
    url: Url,
    as_json: AsJson = False,
) -> None:
    """Forget users with all their behaviours."""

    async def work(store: HistoryStore) -> dict[str, int]:
        return {user: await store.delete(user) for user in users}

    deleted = _on_store(url, work, create=False)
    lines = [
        f"{user}: {count:,} behaviours deleted" if count else f"{user}: nothing was stored"
        for user, count in deleted.items()
    ]
    _show({"deleted": deleted}, "\n".join(lines), as_json)


@history.command("users")
def users_command(
    url: Url,
    limit: Annotated[int, typer.Option(min=0, help="How many users to show.")] = 10,
    after: Annotated[str | None, typer.Option(help="Show users after this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count the users and show the first few, in order."""

    async def work(store: HistoryStore) -> tuple[int, list[str]]:
        count = 0
        async for _ in _users(store):
            count += 1
        return count, await store.users(after, limit) if limit else []

    count, shown = _on_store(url, work, create=False)
    words = "\n".join(
        [f"{url_without_password(url)}: {count:,} users", *(f"  {user}" for user in shown)]
    )
    _show({"users": count, "shown": shown}, words, as_json)


@history.command("migrate")
def migrate_command(url: Url, as_json: AsJson = False) -> None:
    """Bring a store of the earlier format to the present one; it may be repeated."""
    moved = _on_store(url, lambda store: store.migrate(), create=False)
    words = f"{moved:,} users migrated" if moved else "the store has the present format already"
    _show({"migrated": moved}, f"{url_without_password(url)}: {words}", as_json)


# ---- import --------------------------------------------------------------------------------------


def import_people(data: SequenceStore, url: str, most: int) -> dict[str, int]:
    """Import the whole behaviours of at most `most` users, evenly chosen, into a store."""
    chosen_U = np.zeros(data.num_users, dtype=bool)
    chosen_U[np.linspace(0, data.num_users - 1, min(most, data.num_users)).astype(np.int64)] = True
    ends_U = np.where(chosen_U, data.lengths_U, 0)
    with Ticker() as ticker:
        return _on_store(url, lambda opened: _import(opened, data, ends_U, False, ticker))


def _ends(data: SequenceStore, until: Until, split: Split) -> np.ndarray:
    """Return how many behaviours of each user are imported."""
    if until is Until.validation:
        return split.train_lengths(data)
    if until is Until.test:
        return split.held_out(data, "test").begins_U
    return data.lengths_U


async def _import(
    store: HistoryStore, data: SequenceStore, ends_U: np.ndarray, force: bool, ticker: Ticker
) -> dict[str, int]:
    users = behaviours = 0
    await store.check()
    for end, batch in _batches(data, ends_U):
        written = set(await store.import_histories(batch, replace=force))
        users += len(written)
        behaviours += sum(len(history) for user, history in batch if user in written)
        ticker("importing", end, data.num_users)
    return {"users": users, "behaviours": behaviours}


def _batches(
    data: SequenceStore, ends_U: np.ndarray
) -> Iterator[tuple[int, list[tuple[str, History]]]]:
    """Yield (users done, histories by user) in parts of about `BATCH` behaviours."""
    item_ids = _original_ids(data.items)
    labels = {
        name: np.array(each.labels.to_pylist(), dtype=object) for name, each in data.context.items()
    }
    batch: list[tuple[str, History]] = []
    held = 0
    for row in range(data.num_users):
        begin = int(data.offsets_U1[row])
        cut = slice(begin, begin + int(ends_U[row]))
        actions = {name: values_N[cut] for name, values_N in data.actions.items()}
        context = {name: labels[name][each.codes[cut]] for name, each in data.context.items()}
        items, times = item_ids[data.items_N[cut]], data.timestamps_N[cut]
        history = History(items, times, actions, context=context)
        if len(history):
            batch.append((str(data.users.id(row)), history))
            held += len(history)
        if held >= BATCH or row == data.num_users - 1:
            yield row + 1, batch
            batch, held = [], 0


def _original_ids(vocabulary: Vocabulary) -> np.ndarray:
    """Return the original ids by row: int64, or an object array of text."""
    if vocabulary.ids_V is not None:
        return vocabulary.ids_V
    return np.array([vocabulary.id(row) for row in range(len(vocabulary))], dtype=object)


# ---- export --------------------------------------------------------------------------------------


async def _users(store: HistoryStore) -> AsyncIterator[str]:
    after: str | None = None
    while page := await store.users(after, PAGE):
        for user in page:
            yield user
        after = page[-1]


async def _histories(
    store: HistoryStore, user: str | None, ticker: Ticker
) -> AsyncIterator[tuple[str, History]]:
    """Yield every user's behaviours, or those of one user."""
    if user is not None:
        found = await store.read(user, EVERYTHING)
        if found is not None:
            yield user, found
        return
    done = 0
    async for each in _users(store):
        found = await store.read(each, EVERYTHING)
        if found is not None:  # deleted meanwhile
            yield each, found
        done += 1
        ticker("reading histories", done, 0)


def _column(action: str) -> str:
    """Return the column of an action; one that is called like a column of the log is marked."""
    return f"action:{action}" if action in LOG_COLUMNS else action


def _context_column(name: str) -> str:
    """Return the column of context, marked so that no action has its name."""
    return f"context:{name}"


def known_labels(labels_T: np.ndarray) -> list[str | None]:
    """Return labels of context, None where one is not known."""
    return [label or None for label in labels_T.tolist()]


async def _write_lines(
    store: HistoryStore, user: str | None, path: Path, ticker: Ticker
) -> dict[str, int]:
    users = behaviours = 0
    with path.open("w", encoding="utf-8") as file:
        async for name, history in _histories(store, user, ticker):
            columns = {
                "user_id": [name] * len(history),
                "item_id": history.items.tolist(),
                "timestamp": history.timestamps.tolist(),
                **{_column(key): values.tolist() for key, values in history.actions.items()},
                **{_context_column(k): known_labels(v) for k, v in history.context.items()},
            }
            rows = zip(*columns.values(), strict=True)
            for row in rows:
                file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False))
                file.write("\n")
            users, behaviours = users + 1, behaviours + len(history)
    return {"users": users, "behaviours": behaviours}


async def _write_parquet(
    store: HistoryStore, user: str | None, path: Path, ticker: Ticker
) -> dict[str, int]:
    import pyarrow as pa
    from pyarrow import parquet

    # One pass finds the columns, a second one writes them.
    names: dict[str, None] = {}
    context: dict[str, None] = {}
    text = False
    async for _, history in _histories(store, user, ticker):
        names |= dict.fromkeys(history.actions)
        context |= dict.fromkeys(history.context)
        text = text or history.items.dtype == object
    schema = pa.schema(
        [
            ("user_id", pa.string()),
            ("item_id", pa.string() if text else pa.int64()),
            ("timestamp", pa.int64()),
            *((_column(name), pa.float32()) for name in names),
            *((_context_column(name), pa.string()) for name in context),
        ]
    )
    users = behaviours = 0
    with parquet.ParquetWriter(path, schema) as writer:
        held: list[pa.RecordBatch] = []
        async for name, history in _histories(store, user, ticker):
            new = (set(history.actions) - set(names)) | (set(history.context) - set(context))
            if new or (history.items.dtype == object) > text:
                raise SlipstreamError("the store changed while it was exported; run it again")
            held.append(_record_batch(name, history, schema, names, context))
            users, behaviours = users + 1, behaviours + len(history)
            if sum(batch.num_rows for batch in held) >= BATCH:
                writer.write_table(pa.Table.from_batches(held))
                held = []
        writer.write_table(pa.Table.from_batches(held, schema))
    return {"users": users, "behaviours": behaviours}


def _record_batch(
    user: str,
    history: History,
    schema: Any,
    names: dict[str, None],
    context: dict[str, None],
) -> Any:
    import pyarrow as pa

    items = history.items.tolist()
    if pa.types.is_string(schema.field("item_id").type):
        items = [str(item) for item in items]
    absent = np.zeros(len(history), dtype=np.float32)
    columns = [
        [user] * len(history),
        items,
        history.timestamps,
        *(history.actions.get(name, absent) for name in names),
        *(
            known_labels(history.context[name])
            if name in history.context
            else [None] * len(history)
            for name in context
        ),
    ]
    arrays = [
        pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)
    ]
    return pa.record_batch(arrays, schema=schema)


# ---- all -----------------------------------------------------------------------------------------


def _on_store(
    url: str, work: Callable[[HistoryStore], Awaitable[Answer]], create: bool = True
) -> Answer:
    """Open a store, do some work on it and close it."""
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise SlipstreamError(
            "history stores need the extra 'serving'; install slipstream[serving]"
        ) from error

    async def whole() -> Answer:
        store = open_history_store(url, create=create)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(whole())


def _show(report: dict[str, Any], words: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        console.print(words)
