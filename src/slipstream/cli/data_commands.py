"""`slipstream data prepare`, `slipstream data append` and `slipstream data inspect`.

Touch this when a choice of preparing data gets a flag; the work is in data/preparation.py and
data/append.py.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.cli.output import JsonFlag, print_json
from slipstream.data.append import AppendReport, append_log, recorded_choices
from slipstream.data.catalogue import ENTRIES, NAMES
from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.item_vectors import vector_words
from slipstream.data.log_files import SEPARATORS
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.data.statistics import draw_plots, feature_words, figures, statistics, summary
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic, with_lengths
from slipstream.errors import SlipstreamError
from slipstream.progress import Ticker

data = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Prepare a log for training, and show what was prepared.",
)


@data.command("prepare")
def prepare_command(
    names: list[str] | None = typer.Argument(
        None,
        metavar="NAME|FILE…",
        help=f"A known data set ({', '.join(NAMES)}), or a log: CSV, JSON lines or Parquet files, "
        "folders, patterns such as 'logs/*.csv'.",
    ),
    out: Path = typer.Option(..., "--out", help="Directory of the store to write."),
    source: Path | None = typer.Option(
        None, "--source", help="Take a known data set from this archive or folder; no download."
    ),
    sql: str | None = typer.Option(
        None, help="The log is the answer of this query, run by DuckDB (the extra `sql`)."
    ),
    database: Path | None = typer.Option(None, help="DuckDB file that --sql asks."),
    user_column: str = typer.Option(
        "user_id", help="Own log: column of the user id (whole numbers or text)."
    ),
    item_column: str = typer.Option(
        "item_id", help="Own log: column of the item id (whole numbers or text)."
    ),
    time_column: str | None = typer.Option(
        None,
        help="Own log: column of the time (timestamp unless given): ISO text, dates or numbers; "
        "`none`: the order of rows is the order.",
    ),
    action_columns: str = typer.Option(
        "", help="Own log: columns of actions, separated by commas: numbers, true/false or text."
    ),
    action_values: str = typer.Option(
        "",
        help="Own log: the numbers of text actions, as in view=1,cart=2,buy=3; without, each text "
        "becomes a 0/1 action of its own.",
    ),
    context_columns: str = typer.Option(
        "",
        help="Own log: categories that each behaviour happened with, such as device,surface; "
        "separated by commas.",
    ),
    title_column: str | None = typer.Option(None, help="Own log: column of the item's title."),
    time_unit: str | None = typer.Option(
        None, help="Own log: unit of the time column: s, ms, us or ns; found unless given."
    ),
    nulls: str | None = typer.Option(
        None, help="Rows that lack user, item or time: drop (own logs) or error (known data sets)."
    ),
    duplicates: str | None = typer.Option(
        None, help="Rows that repeat another exactly: drop (own logs) or keep (known data sets)."
    ),
    items: str | None = typer.Option(
        None, help="Own log: file with features of items. synthetic: number of items (2000)."
    ),
    item_id: str | None = typer.Option(
        None, help="Column of the item id in --items (as in the log unless given)."
    ),
    item_features: str = typer.Option(
        "",
        help="Columns of --items (or of the log), separated by commas; a kind may follow: "
        "price:number, year:category, tags:categories.",
    ),
    item_title: str | None = typer.Option(None, help="Column of the title in --items."),
    users: str | None = typer.Option(
        None, help="Own log: file with features of users. synthetic: number of users (1000)."
    ),
    user_id: str | None = typer.Option(
        None, help="Column of the user id in --users (as in the log unless given)."
    ),
    user_features: str = typer.Option("", help="Columns of --users (or of the log)."),
    multi_separator: str | None = typer.Option(
        None, help="Text features that contain this, such as '|', are several categories."
    ),
    item_vectors: list[str] | None = typer.Option(
        None,
        metavar="NAME=FILE",
        help="Pretrained vectors of items: Parquet with ids and a column of lists, or x.npy with "
        "its ids in x.ids.npy; may be given several times.",
    ),
    order: str = typer.Option(
        "stable", help="Order of a user's behaviours. `stable`: by time, equal times in file order."
    ),
    min_item_count: int | None = typer.Option(
        None, min=1, help="Drop items with fewer behaviours (ml-1m, ml-20m: 5 unless given)."
    ),
    min_user_count: int | None = typer.Option(
        None, min=1, help="Drop users with fewer behaviours, after the items."
    ),
    k_core: int | None = typer.Option(
        None,
        min=1,
        help="Drop users and items below this count until none is left (amazon-reviews: 5).",
    ),
    category: str = typer.Option("All_Beauty", help="amazon-reviews: the category."),
    topics: int = typer.Option(50, min=1, help="synthetic: number of topics the items belong to."),
    lengths: str = typer.Option(
        "movielens",
        help="synthetic: lengths like those of movielens, kuairand-1k or kuairand-27k.",
    ),
    seed: int = typer.Option(0, min=0, help="synthetic: seed."),
    force: bool = typer.Option(False, "--force", help="Replace the store in --out."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Turn a raw log into a sequence store.

    A store holds jagged Arrow columns, memory-mapped, with a vocabulary and a digest.
    """
    name = names[0] if names and len(names) == 1 else names or None
    time, optional = (time_column, False) if time_column else ("timestamp", True)
    columns = Columns(
        user_column,
        item_column,
        None if time == "none" else time,
        split_list(action_columns),
        title_column,
        time_optional=optional,
        context=split_list(context_columns),
    )
    features: dict[str, FeatureFile | None] = {"items": None, "users": None}
    synthetic = Synthetic()
    if name == "synthetic":
        sizes = {"users": _count(users, 1_000, "users"), "items": _count(items, 2_000, "items")}
        synthetic = with_lengths(Synthetic(**sizes, topics=topics, seed=seed), lengths)
    else:
        features["items"] = _feature_file(
            items, item_id, item_features, multi_separator, item_title
        )
        features["users"] = _feature_file(users, user_id, user_features, multi_separator)
    choices = Choices(
        source=source,
        columns=columns,
        time_unit=time_unit,
        nulls=nulls,
        duplicates=duplicates,
        action_values=split_values(action_values),
        sql=sql,
        database=database,
        order=order,
        min_item_count=min_item_count,
        min_user_count=min_user_count,
        k_core=k_core,
        category=category,
        synthetic=synthetic,
        item_vectors=_vector_files(item_vectors),
        **features,
    )
    with Ticker() as ticker:
        store = prepare(name, out, choices, force=force, progress=ticker)
    if as_json:
        print(json.dumps(summary(store)))
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for line in preparation_report(store):
        console.print(line)


def split_list(text: str) -> tuple[str, ...]:
    """Split `a, b,c` into its parts."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_values(text: str) -> dict[str, float] | None:
    """Split `view=1,cart=2` into numbers by text."""
    values = {}
    for part in split_list(text):
        word, equals, number = part.rpartition("=")
        try:
            values[word.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(values[word.strip()]):
            raise SlipstreamError(
                f"'{part}' of --action-values is no text with a number; write it as in "
                "view=1,cart=2,buy=3"
            )
    return values or None


def _count(given: str | None, default: int, noun: str) -> int:
    if given is None:
        return default
    if not given.isdecimal() or int(given) < 1:
        raise SlipstreamError(
            f"--{noun} of a synthetic log is a whole number from 1, got '{given}'"
        )
    return int(given)


def _feature_file(
    data: str | None,
    ids: str | None,
    features: str,
    separator: str | None,
    title: str | None = None,
) -> FeatureFile | None:
    if not (data or ids or features or title):
        return None
    return FeatureFile(data, ids, split_list(features), title, separator)


def _vector_files(given: list[str] | None) -> dict[str, str]:
    """Split each `NAME=FILE`."""
    files = {}
    for part in given or ():
        name, equals, file = part.partition("=")
        if not (equals and name and file) or name in files:
            raise SlipstreamError(
                f"'{part}' of --item-vectors is no new name with a file; write it as in "
                "text=vectors.parquet"
            )
        files[name] = file
    return files


def preparation_report(store: SequenceStore) -> list[str]:
    """Say what was written, what was found out about the log and what was dropped."""
    found = summary(store)
    source = found["source"]
    lines = [
        f"{store.directory}: {store.num_users:,} users, {store.num_items:,} items, "
        f"{store.num_behaviours:,} behaviours (order {found['order']}, digest {store.digest})"
    ]
    if "columns" in source:
        files = f" in {source['files']:,} files" if source["files"] > 1 else ""
        separator = SEPARATORS.get(source.get("separator", ""))
        read = f"read {found['rows_read']:,} rows of {source['path']}{files}"
        read += f", separated by {separator}" if separator else ""
        lines.append(f"{read}; times: {source['time_format']}")
    if not store.timed:
        lines.append("without times, the order of rows is the order, and no time bias is learnt")
    if source.get("nulls"):
        by_column = ", ".join(f"{n} {count:,}" for n, count in source["nulls_by_column"].items())
        lines.append(f"dropped {source['nulls']:,} rows that lack a value ({by_column})")
    if source.get("duplicates"):
        lines.append(f"dropped {source['duplicates']:,} exact duplicates")
    if found["actions"] and "columns" in source:
        lines.append(f"actions: {', '.join(found['actions'])}")
    for name, count in found["context"].items():
        lines.append(f"context {name}: {count:,} categories")
    for noun in ("item", "user"):
        for name, feature in found[f"{noun}_features"].items() if "columns" in source else ():
            lines.append(f"{noun} feature {name}: {feature_words(feature)}{_hint(feature)}")
        rows = source.get(f"{noun}_rows", {})
        if "columns" in source and (rows.get("not_in_the_log") or rows.get("repeated")):
            lines.append(
                f"left out {rows['not_in_the_log']:,} {noun}s that are not in the log, and "
                f"{rows['repeated']:,} rows that repeat one"
            )
    for name, facts in store.meta.get("item_vectors", {}).items():
        lines.append(vector_words(name, facts, store.num_items))
    if source.get("md5_known") is False:
        lines.append(f"no md5 is known for this archive; the one that came has md5 {source['md5']}")
    return lines


def _hint(feature: dict[str, Any]) -> str:
    bar = feature["kind"] == "category" and feature["bars"]
    return "; if '|' parts several categories, give --multi-separator '|'" if bar else ""


@data.command("list")
def list_command(as_json: JsonFlag = False) -> None:
    """List the data sets that are known by name: what they are and their terms."""
    rows = [{"name": n, "about": e.about, "terms": e.terms} for n, e in ENTRIES.items()]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "what it is", "terms")
    for row in rows:
        table.add_row(*row.values())
    Console(highlight=False).print(table)


@data.command("append")
def append_command(
    directory: Path = typer.Argument(..., help="A store written by `slipstream data prepare`."),
    files: list[str] = typer.Argument(..., help="Later logs, with the columns of the store's own."),
    out: Path | None = typer.Option(
        None, "--out", help="Write the grown store here; unless given, STORE itself grows."
    ),
    late: str = typer.Option(
        "error", help="Behaviours older than their user's last one: error, or drop."
    ),
    user_column: str | None = typer.Option(None, help="Column of the user id, if it has moved."),
    item_column: str | None = typer.Option(None, help="Column of the item id, if it has moved."),
    time_column: str | None = typer.Option(None, help="Column of the time, if it has moved."),
    action_columns: str | None = typer.Option(None, help="Columns of actions, if they have moved."),
    context_columns: str | None = typer.Option(
        None, help="Columns of context, if they have moved."
    ),
    items: str | None = typer.Option(None, help="File with the features of new items."),
    users: str | None = typer.Option(None, help="File with the features of new users."),
    item_vectors: list[str] | None = typer.Option(
        None, metavar="NAME=FILE", help="Pretrained vectors of new items, as in data prepare."
    ),
    force: bool = typer.Option(False, "--force", help="Replace the store in --out."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Append later behaviours, new users and new items to a store.

    Rows of existing users and items keep their numbers, so training goes on from a checkpoint.
    """
    given = {
        "user": user_column,
        "item": item_column,
        "time": time_column,
        "actions": None if action_columns is None else split_list(action_columns),
        "context": None if context_columns is None else split_list(context_columns),
    }
    moved = {role: name for role, name in given.items() if name is not None}
    columns = None
    if moved:
        columns = replace(recorded_choices(SequenceStore.open(directory)).columns, **moved)  # type: ignore[arg-type]
    with Ticker() as ticker:
        done = append_log(
            directory,
            files,
            out=out,
            late=late,
            columns=columns,
            items=items,
            users=users,
            item_vectors=_vector_files(item_vectors),
            force=force,
            progress=ticker,
        )
    if as_json:
        new = {k: v for k, v in vars(done).items() if k != "store"}
        print(json.dumps({"appended": new} | summary(done.store)))
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for line in append_report(done):
        console.print(line)


def append_report(done: AppendReport) -> list[str]:
    """Say what an append added and left out."""
    store = done.store
    if done.already:
        return [f"{store.directory}: this log was appended before, so nothing has changed"]
    lines = [
        f"{store.directory}: {done.behaviours:,} behaviours, {done.users:,} new users and "
        f"{done.items:,} new items appended",
        f"now {store.num_users:,} users, {store.num_items:,} items, {store.num_behaviours:,} "
        f"behaviours (digest {store.digest})",
    ]
    if not done.behaviours:
        lines = [f"{store.directory}: the log has nothing new, so nothing has changed"]
    if done.late:
        lines.append(f"left out {done.late:,} behaviours older than their user's last one")
    if done.duplicates:
        lines.append(f"left out {done.duplicates:,} behaviours that were there already")
    for name, facts in store.meta.get("item_vectors", {}).items() if done.items else ():
        if facts["missing_new"]:
            lines.append(
                f"{facts['missing_new']:,} of the new items have no vector '{name}' (zeros); give "
                f"theirs with --item-vectors {name}=FILE"
            )
    return lines


@data.command("inspect")
def inspect_command(
    directory: Path = typer.Argument(..., help="A store written by `slipstream data prepare`."),
    plots: Path | None = typer.Option(
        None, "--plots", help="Where the PNG goes (next to the store's files unless given)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Print statistics of a store and draw its length histogram and popularity curve."""
    store = SequenceStore.open(directory)
    with Ticker() as ticker:
        ticker("reading the store", 0, 0)
        facts = figures(store) if as_json else statistics(store)
        picture = draw_plots(store, plots or directory / "inspect.png")
    if as_json:
        print(json.dumps(facts | {"plots": str(picture)}))
        return
    table = Table(title=str(directory), show_header=False)
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"plots: {picture}", soft_wrap=True)
