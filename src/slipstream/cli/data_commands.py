"""`slipstream data prepare` and `slipstream data inspect`.

Touch this when a choice of preparing data gets a flag; the work is in data/prepare.py.
"""

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from slipstream.data.catalogue import NAMES
from slipstream.data.preparation import Choices, prepare
from slipstream.data.raw_log import Columns
from slipstream.data.statistics import draw_plots, statistics
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
    name: str = typer.Argument(
        ..., help=f"A known data set ({', '.join(NAMES)}), or the path of a CSV or Parquet log."
    ),
    out: Path = typer.Option(..., "--out", help="Directory of the store to write."),
    source: Path | None = typer.Option(
        None, "--source", help="Take a known data set from this archive or folder; no download."
    ),
    user_column: str = typer.Option(
        "user_id", help="Own log: column of the user id (whole numbers or text)."
    ),
    item_column: str = typer.Option(
        "item_id", help="Own log: column of the item id (whole numbers or text)."
    ),
    time_column: str = typer.Option(
        "timestamp", help="Own log: column of the time (a number in --time-unit, or dates)."
    ),
    action_columns: str = typer.Option(
        "", help="Own log: columns of actions, separated by commas (numbers or true/false)."
    ),
    title_column: str | None = typer.Option(None, help="Own log: column of the item's title."),
    time_unit: str = typer.Option("s", help="Own log: unit of the time column: s, ms, us or ns."),
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
    users: int = typer.Option(1_000, min=1, help="synthetic: number of users."),
    items: int = typer.Option(2_000, min=1, help="synthetic: number of items."),
    topics: int = typer.Option(50, min=1, help="synthetic: number of topics the items belong to."),
    lengths: str = typer.Option(
        "movielens", help="synthetic: lengths like those of movielens or kuairand-1k."
    ),
    seed: int = typer.Option(0, min=0, help="synthetic: seed."),
    force: bool = typer.Option(False, "--force", help="Replace what is in --out."),
) -> None:
    """Turn a raw log into a sequence store.

    A store holds jagged Arrow columns, memory-mapped, with a vocabulary and a digest.
    """
    actions = tuple(part.strip() for part in action_columns.split(",") if part.strip())
    if len({user_column, item_column, time_column, *actions}) < 3 + len(actions):
        raise SlipstreamError(
            "user, item, time and action columns must be different columns, each named once"
        )
    choices = Choices(
        source=source,
        columns=Columns(user_column, item_column, time_column, actions, title_column),
        time_unit=time_unit,
        order=order,
        min_item_count=min_item_count,
        min_user_count=min_user_count,
        k_core=k_core,
        category=category,
        synthetic=with_lengths(
            Synthetic(users=users, items=items, topics=topics, seed=seed), lengths
        ),
    )
    with Ticker() as ticker:
        store = prepare(name, out, choices, force=force, progress=ticker)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{out}: {store.num_users:,} users, {store.num_items:,} items, {store.num_behaviours:,} "
        "behaviours "
        f"(order {store.meta['order']}, digest {store.digest})"
    )
    if store.meta["source"].get("md5_known") is False:
        console.print(
            "no md5 is known for this archive; the one that came has md5 "
            f"{store.meta['source']['md5']}"
        )


@data.command("inspect")
def inspect_command(
    directory: Path = typer.Argument(..., help="A store written by `slipstream data prepare`."),
    plots: Path | None = typer.Option(
        None, "--plots", help="Where the PNG goes (next to the store's files unless given)."
    ),
) -> None:
    """Print statistics of a store and draw its length histogram and popularity curve."""
    store = SequenceStore.open(directory)
    with Ticker() as ticker:
        ticker("reading the store", 0, 0)
        facts = statistics(store)
        picture = draw_plots(store, plots or directory / "inspect.png")
    table = Table(title=str(directory), show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"plots: {picture}", soft_wrap=True)
