"""`slipstream serve` and `slipstream client …`: a bundle behind HTTP, and requests to it.

Touch this when the server or the client gets another flag; the work is in serving/.
"""

import importlib.util
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.serving.http.client import Client

KEY_VARIABLE = "SLIPSTREAM_API_KEY"
console = Console(highlight=False, soft_wrap=True)
client = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Ask a running server (`slipstream serve`).",
)

Url = Annotated[str, typer.Option(help="Where the server is.", envvar="SLIPSTREAM_URL")]
Items = Annotated[str, typer.Argument(help="Item ids, separated by commas.", show_default=False)]
User = Annotated[str, typer.Argument(help="The user's id.", show_default=False)]
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
    from slipstream.serving.supervisor import DeploymentConfig, Supervisor

    keys = read_keys(key_file)
    if host not in ("127.0.0.1", "::1", "localhost") and not keys:
        raise SlipstreamError(
            f"listening on {host} without an API key would serve anybody; set ${KEY_VARIABLE} or "
            "give --key-file"
        )
    check_bundle(bundle)
    if long and (long_from is None or long >= instances):
        raise SlipstreamError(
            "--long needs --long-from, and leaves at least one instance for short requests"
        )
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
    console.print(
        f"serving {bundle} at {supervisor.url} ({instances} instances; Ctrl-C ends); try: "
        "slipstream client health"
    )
    supervisor.run()
    console.print("every request under way was finished; goodbye")


def check_bundle(bundle: Path) -> None:
    """Refuse what is no bundle before any instance starts."""
    from slipstream.bundle import DESCRIPTION
    from slipstream.files import read_json

    if not (bundle / DESCRIPTION).is_file():
        raise SlipstreamError(
            f"{bundle} is not a bundle (no {DESCRIPTION}); make one with `slipstream export RUN "
            f"--out {bundle}`"
        )
    read_json(bundle / DESCRIPTION)


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


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SlipstreamError(f"'{text}' is not a list of ids; write them like 1,2,3") from error


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
    url: Url = DEFAULT_URL,
    relay: Annotated[
        bool, typer.Option("--relay", help="Pre-infer first, as a retrieval stage would.")
    ] = False,
) -> None:
    """Score candidates for a stored user."""
    with _open(url) as connection:
        items = _numbers(candidates)
        ticket = connection.preinfer(user).ticket if relay else None
        answer = connection.rank(user, items, ticket=ticket)
    _show(
        items,
        answer.scores,
        f"{answer.hit} on {answer.instance}, {answer.behaviours} behaviours, version "
        f"{answer.version}",
    )


@client.command()
def recommend(
    user: User,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many items.")] = 10,
    url: Url = DEFAULT_URL,
) -> None:
    """Retrieve, filter and rank items for a stored user."""
    with _open(url) as connection:
        answer = connection.recommend(user, count)
    _show(
        answer.items,
        answer.scores,
        f"{answer.hit} on {answer.instance}, {answer.behaviours} behaviours",
    )


@client.command()
def events(
    user: User,
    items: Items,
    timestamps: Annotated[
        str, typer.Option(help="Seconds since 1970, one per item; now unless given.")
    ] = "",
    actions: Annotated[
        list[str] | None,
        typer.Option(help="NAME=V1,V2,…: one value per item. May be given several times."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Append behaviours to a user's stored history."""
    import time

    ids = _numbers(items)
    times = _numbers(timestamps) if timestamps else [int(time.time())] * len(ids)
    values: dict[str, list[float]] = {}
    for action in actions or []:
        name, _, text = action.partition("=")
        try:
            values[name] = [float(part) for part in text.split(",")]
        except ValueError as error:
            raise SlipstreamError(
                f"'{action}' is not an action; write it like click=1,0,1"
            ) from error
    with _open(url) as connection:
        total = connection.events(user, ids, times, actions=values).behaviours
    console.print(f"{total} behaviours of {user} are stored")


@client.command()
def user(
    user: User, limit: Annotated[int, typer.Option(min=0, max=1000)] = 20, url: Url = DEFAULT_URL
) -> None:
    """Show the stored history of a user."""
    with _open(url) as connection:
        answer = connection.user(user, limit)
    _show(
        answer.recent.items,
        {"time": [float(t) for t in answer.recent.timestamps], **answer.recent.actions},
        f"{answer.behaviours} in all",
    )


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


def _show(items: list[int], columns: dict[str, list[float]], caption: str) -> None:
    table = Table(caption=caption, caption_justify="left")
    for heading in ("item", *columns):
        table.add_column(heading, justify="right")
    for place, item in enumerate(items):
        table.add_row(str(item), *(f"{values[place]:.10g}" for values in columns.values()))
    console.print(table)
