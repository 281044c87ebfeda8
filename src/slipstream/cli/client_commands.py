"""`slipstream client …`: requests to a running server.

Touch this when the client gets another command or flag; what operators send is in
operator_commands.py.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from slipstream.cli.client_inputs import (
    read_actions,
    read_labels,
    read_list,
    read_message,
    read_names,
    read_request_labels,
    read_times,
)
from slipstream.cli.connection import (
    DEFAULT_URL,
    AsJson,
    Url,
    console,
    need_serving_extra,
    open_client,
)
from slipstream.cli.operator_commands import (
    drain,
    promote,
    reload,
    rollback,
    traffic,
    undrain,
    versions,
)
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.serving.http import messages

client = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Ask a running server (`slipstream serve`).",
)

LIST = 'separated by commas, or as JSON: ["a,b"]'
Items = Annotated[str, typer.Argument(help=f"Item ids, {LIST}.", show_default=False)]
User = Annotated[str, typer.Argument(help="The user's id.", show_default=False)]
Sent = Annotated[
    str,
    typer.Option(
        "--history",
        help=f"The user's items, oldest first, instead of the stored ones; {LIST}.",
        show_default=False,
    ),
]
Times = Annotated[str, typer.Option(help="Seconds since 1970, one per item; now unless given.")]
Actions = Annotated[
    list[str] | None,
    typer.Option(help="NAME=V1,V2,…: one value per item. May be given several times."),
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--context", help="NAME=LABEL1,LABEL2,…: one label per item. May be given several times."
    ),
]
RequestLabels = Annotated[
    list[str] | None,
    typer.Option(
        "--context",
        help="NAME=LABEL of the request, such as surface=home. May be given several times.",
    ),
]
Titles = Annotated[bool, typer.Option("--titles", help="Show the items' titles.")]
Show = Annotated[str, typer.Option(help="Item features to show, separated by commas.")]


client.callback()(need_serving_extra)


@client.command()
def health(url: Url = DEFAULT_URL) -> None:
    """Check whether the server is ready."""
    from slipstream.serving.http.readiness import is_ready

    if not is_ready(url):
        raise SlipstreamError(f"{url} is not ready; is `slipstream serve` running there?")
    console.print(f"{url} is ready")


@client.command()
def rank(
    user: User,
    candidates: Items,
    history: Sent = "",
    timestamps: Times = "",
    actions: Actions = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="Pre-infer first, as a retrieval stage would.")
    ] = False,
    context: RequestLabels = None,
    titles: Titles = False,
    show: Show = "",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Score candidates for a user.

    Example: slipstream client rank ann 260,1210,480 --titles
    """
    items, sent = read_list(candidates), read_message(history, timestamps, actions)
    more: dict[str, Any] = {"titles": titles, "show": read_names(show)}
    more["context"] = read_request_labels(context)
    with open_client(url) as connection:
        if relay:
            more["ticket"] = connection.preinfer(user, sent).ticket
        answer = connection.rank(user, items, sent, **more)
    caption = f"{answer.hit} on {answer.instance}, {answer.behaviours} behaviours, version "
    caption += answer.version
    if answer.unknown:
        caption += f"; unknown: {', '.join(map(str, answer.unknown))}"
    _show(answer, _columns(answer), caption, as_json)


@client.command()
def recommend(
    user: User,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many items.")] = 10,
    history: Sent = "",
    timestamps: Times = "",
    actions: Actions = None,
    keep_seen: Annotated[
        bool | None,
        typer.Option(
            "--keep-seen/--drop-seen",
            help="Whether items of the history may come again; the model's rule unless given.",
        ),
    ] = None,
    context: RequestLabels = None,
    titles: Titles = False,
    show: Show = "",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Retrieve, filter and rank items for a user.

    Example: slipstream client recommend ann --count 5 --titles
    """
    sent = read_message(history, timestamps, actions)
    more: dict[str, Any] = {"titles": titles, "show": read_names(show)}
    more["context"] = read_request_labels(context)
    with open_client(url) as connection:
        answer = connection.recommend(user, count, history=sent, keep_seen=keep_seen, **more)
    caption = f"{answer.hit} on {answer.instance}, {answer.behaviours} behaviours"
    _show(answer, _columns(answer), caption, as_json)


@client.command()
def events(
    user: User,
    items: Items,
    timestamps: Times = "",
    actions: Actions = None,
    context: Labels = None,
    rank_in_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Announce that a ranking follows in so many milliseconds."),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Append behaviours to a user's stored history.

    Example: slipstream client events ann 2858,1196 --rank-in-ms 120
    """
    ids, values = read_list(items), read_actions(actions)
    times = read_times(timestamps, len(ids)) if timestamps else None
    more: dict[str, Any] = {"actions": values, "context": read_labels(context)}
    if rank_in_ms is not None:
        from slipstream.serving.http.messages import Announcement

        more["preinfer"] = Announcement(rank_in_ms=rank_in_ms)
    with open_client(url) as connection:
        answer = connection.events(user, ids, times, **more)
    if as_json:
        _print_json(answer)
        return
    console.print(f"{answer.behaviours} behaviours of {user} are stored")
    if rank_in_ms is not None:
        told = answer.preinfer
        why = "the announcement failed" if told is None else told.reason
        admitted = told is not None and told.admitted
        console.print(f"pre-inference: {'admitted' if admitted else f'not admitted ({why})'}")


@client.command()
def user(
    user: User,
    limit: Annotated[int, typer.Option(min=0, max=1000)] = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the stored history of a user."""
    with open_client(url) as connection:
        answer = connection.user(user, limit)
    recent = answer.recent
    columns: dict[str, list[Any]] = {"item": list(recent.items), "time": recent.timestamps or []}
    columns |= recent.actions | recent.context
    _show(answer, columns, f"{answer.behaviours} in all", as_json)


@client.command()
def export(user: User, url: Url = DEFAULT_URL) -> None:
    """Print everything that is stored of a user, as JSON.

    Example: slipstream client export ann > ann.json
    """
    with open_client(url) as connection:
        _print_json(connection.export(user))


@client.command()
def delete(user: User, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Delete what is stored of a user."""
    with open_client(url) as connection:
        answer = connection.delete(user)
    if as_json:
        _print_json(answer)
    else:
        console.print(f"{answer.deleted} behaviours of {user} were deleted")


@client.command()
def metrics(url: Url = DEFAULT_URL) -> None:
    """Print counters and gauges in the format of Prometheus."""
    with open_client(url) as connection:
        typer.echo(connection.metrics(), nl=False)


for command in (reload, traffic, promote, rollback, versions, drain, undrain):
    client.command()(command)


def _columns(answer: "messages.RankAnswer | messages.RecommendAnswer") -> dict[str, list[Any]]:
    """Return what a table shows of ranked items."""
    titles = {} if answer.titles is None else {"title": answer.titles}
    return {"item": list(answer.items), **titles, **(answer.shown or {}), **answer.scores}


def _show(answer: Any, columns: dict[str, list[Any]], caption: str, as_json: bool) -> None:
    if as_json:
        _print_json(answer)
        return
    table = Table(caption=Text(caption), caption_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "title" else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(_cell(value)) for value in row))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.10g}" if isinstance(value, float) else "" if value is None else str(value)


def _print_json(answer: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(answer).decode())
