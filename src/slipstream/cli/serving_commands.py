"""`slipstream serve` and `slipstream client …`: a bundle behind HTTP, and requests to it.

Touch this when the server or the client gets another flag; the work is in serving/.
"""

import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.serving.http import messages
    from slipstream.serving.http.client import Client

KEY_VARIABLE = "SLIPSTREAM_API_KEY"
console = Console(highlight=False, soft_wrap=True)
client = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Ask a running server (`slipstream serve`).",
)

Url = Annotated[str, typer.Option(help="Where the server is.", envvar="SLIPSTREAM_URL")]
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
Titles = Annotated[bool, typer.Option("--titles", help="Show the items' titles.")]
Show = Annotated[str, typer.Option(help="Item features to show, separated by commas.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@client.callback()
def _needs_extra() -> None:
    """Refuse with one sentence where the extra libraries of serving are missing."""
    if importlib.util.find_spec("msgspec") is None or importlib.util.find_spec("aiohttp") is None:
        raise SlipstreamError(
            "serving needs its extra libraries: pip install 'slipstream[serving]'"
        )


def serve(
    bundle: Annotated[
        Path, typer.Argument(help="A bundle made by `slipstream export`.", show_default=False)
    ],
    instances: Annotated[
        int, typer.Option(min=1, max=256, help="Instances, one torch thread each.")
    ] = 1,
    routers: Annotated[
        int, typer.Option(min=1, max=64, help="Router processes on the same port.")
    ] = 1,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback an API key is required.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    history: Annotated[
        str, typer.Option(help="History store: sqlite:PATH or redis://HOST:PORT/DB.")
    ] = "sqlite:history.db",
    key_file: Annotated[
        Path | None,
        typer.Option(help=f"File of API keys, one per line; or one in ${KEY_VARIABLE}."),
    ] = None,
    deadline_ms: Annotated[
        float, typer.Option(min=1, max=60_000, help="Deadline of requests that bring none.")
    ] = 1_000.0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests per second and caller; no limit unless given."),
    ] = None,
    burst: Annotated[
        int, typer.Option(min=1, help="Requests a caller may send at once, with --rate.")
    ] = 100,
    long_from: Annotated[
        int | None, typer.Option(min=1, help="Behaviours from which a request is long; see --long.")
    ] = None,
    long: Annotated[
        int, typer.Option(min=0, help="Instances kept for long requests, with --long-from.")
    ] = 0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Time to finish requests at the end.")
    ] = 10.0,
) -> None:
    """Serve a bundle over HTTP: instances behind a router.

    Ctrl-C or SIGTERM finishes the running requests, then ends.

    Example: slipstream serve bundles/ml-1m --instances 2
    """
    _needs_extra()
    from slipstream.serving.start_checks import check_bundle, check_history
    from slipstream.serving.supervisor import DeploymentConfig, Supervisor

    keys = read_keys(key_file)
    if host not in ("127.0.0.1", "::1", "localhost") and not keys:
        raise SlipstreamError(
            f"listening on {host} without an API key would serve anybody; set ${KEY_VARIABLE} or "
            "give --key-file"
        )
    if long and (long_from is None or long >= instances):
        raise SlipstreamError(
            "--long needs --long-from, and leaves at least one instance for short requests"
        )
    check_bundle(bundle)
    check_history(history)
    plan = DeploymentConfig(
        instances,
        {"bundle": str(bundle), "history": history, "deadline_ms": deadline_ms},
        routers=routers,
        host=host,
        port=port,
        router_settings={
            "deadline_ms": deadline_ms,
            "requests_per_second": rate,
            "burst": burst,
            "long_from": long_from,
        },
        api_keys=keys,
        pools=tuple("long" if number < long else "short" for number in range(instances))
        if long
        else (),
        drain_seconds=drain_seconds,
    )
    supervisor = Supervisor(plan, lambda sentence: console.print(sentence, style="dim"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, supervisor.stop)
    hint = "" if supervisor.url == DEFAULT_URL else f" --url {supervisor.url}"
    console.print(
        f"serving {bundle} at {supervisor.url} ({instances} instances; Ctrl-C ends); try: "
        f"slipstream client health{hint}"
    )
    supervisor.run()
    console.print("every request under way was finished; goodbye")


def read_keys(key_file: Path | None) -> tuple[str, ...]:
    """Read API keys from a file or the environment.

    They are never taken from the command line, which every user of the machine can read.
    """
    from slipstream.serving.http.limits import Keys

    if key_file is not None:
        try:
            lines = key_file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SlipstreamError(
                f"the key file {key_file} cannot be read: {error.strerror}"
            ) from error
        keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not keys:
            raise SlipstreamError(f"the key file {key_file} holds no key; write one per line")
    else:
        keys = tuple(key for key in os.environ.get(KEY_VARIABLE, "").split(",") if key)
    if any("," in key or not key.isascii() or not key.isprintable() for key in keys):
        raise SlipstreamError("API keys are printable ASCII without commas")
    Keys(keys)
    return keys


def _open(url: str) -> "Client":
    from slipstream.serving.http.client import Client

    return Client(url, os.environ.get(KEY_VARIABLE))


def read_list(text: str) -> list[int | str]:
    """Read ids from the command line; what is no JSON stays text, and the server knows its kind."""
    parts: list[Any] = [part.strip() for part in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = [None]
    if not parts or not all(type(part) in (int, str) and part != "" for part in parts):
        raise SlipstreamError(
            f'\'{text}\' is not a list of ids; write them like 1,2,3 or ["a,b", "c"]'
        )
    return parts


def _times(text: str, count: int) -> list[int]:
    """Read times from the command line; now for each of `count` items where none are given."""
    try:
        return [int(part) for part in text.split(",")] if text else [int(time.time())] * count
    except ValueError as error:
        raise SlipstreamError(
            f"'{text}' is not a list of times; write seconds like 978300000,978300100"
        ) from error


def _actions(given: list[str] | None) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for action in given or []:
        name, _, text = action.partition("=")
        try:
            values[name] = [float(part) for part in text.split(",")]
        except ValueError as error:
            raise SlipstreamError(
                f"'{action}' is not an action; write it like click=1,0,1"
            ) from error
    return values


def _message(
    history: str, timestamps: str, actions: list[str] | None
) -> "messages.HistoryMessage | None":
    """Return the history that a command was given, None where it names a stored user only."""
    from slipstream.serving.http.messages import HistoryMessage

    if not history:
        return None
    items = read_list(history)
    return HistoryMessage(items, _times(timestamps, len(items)), _actions(actions))


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@client.command()
def health(url: Url = DEFAULT_URL) -> None:
    """Check whether the server is ready."""
    from slipstream.serving.supervisor import is_ready

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
    titles: Titles = False,
    show: Show = "",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Score candidates for a user.

    Example: slipstream client rank ann 260,1210,480 --titles
    """
    items, sent = read_list(candidates), _message(history, timestamps, actions)
    more: dict[str, Any] = {"titles": titles, "show": _names(show)}
    with _open(url) as connection:
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
    titles: Titles = False,
    show: Show = "",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Retrieve, filter and rank items for a user.

    Example: slipstream client recommend ann --count 5 --titles
    """
    sent = _message(history, timestamps, actions)
    with _open(url) as connection:
        answer = connection.recommend(
            user, count, history=sent, keep_seen=keep_seen, titles=titles, show=_names(show)
        )
    caption = f"{answer.hit} on {answer.instance}, {answer.behaviours} behaviours"
    _show(answer, _columns(answer), caption, as_json)


@client.command()
def events(
    user: User,
    items: Items,
    timestamps: Times = "",
    actions: Actions = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Append behaviours to a user's stored history.

    Example: slipstream client events ann 2858,1196
    """
    ids, values = read_list(items), _actions(actions)
    times = _times(timestamps, len(ids)) if timestamps else None
    with _open(url) as connection:
        answer = connection.events(user, ids, times, actions=values)
    if as_json:
        _print_json(answer)
    else:
        console.print(f"{answer.behaviours} behaviours of {user} are stored")


@client.command()
def user(
    user: User,
    limit: Annotated[int, typer.Option(min=0, max=1000)] = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the stored history of a user."""
    with _open(url) as connection:
        answer = connection.user(user, limit)
    recent = answer.recent
    columns: dict[str, list[Any]] = {"item": list(recent.items), "time": recent.timestamps or []}
    columns |= recent.actions
    _show(answer, columns, f"{answer.behaviours} in all", as_json)


@client.command()
def delete(user: User, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Delete what is stored of a user."""
    with _open(url) as connection:
        answer = connection.delete(user)
    if as_json:
        _print_json(answer)
    else:
        console.print(f"{answer.deleted} behaviours of {user} were deleted")


@client.command()
def reload(
    url: Url = DEFAULT_URL,
    version: Annotated[str | None, typer.Option(help="The version expected.")] = None,
) -> None:
    """Make every instance open its bundle again, one after the other."""
    with _open(url) as connection:
        answer = connection.reload(version)
    for name, after in answer.after.items():
        console.print(f"{name}: {answer.before[name]} → {after}")


@client.command()
def drain(
    instance: Annotated[str, typer.Argument(help="The instance, for example i-0.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Take an instance out of service: it finishes what it has."""
    with _open(url) as connection:
        console.print(f"{connection.drain(instance).draining} is draining")


@client.command()
def metrics(url: Url = DEFAULT_URL) -> None:
    """Print counters and gauges in the format of Prometheus."""
    with _open(url) as connection:
        typer.echo(connection.metrics(), nl=False)


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
