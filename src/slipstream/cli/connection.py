"""How a command reaches a running server: its address, its key, and what every command prints with.

Touch this when the address or the key comes from another place.
"""

import importlib.util
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.serving.http.client import Client

KEY_VARIABLE = "SLIPSTREAM_API_KEY"
ADMIN_KEY_VARIABLE = "SLIPSTREAM_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Where the server is.", envvar="SLIPSTREAM_URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
console = Console(highlight=False, soft_wrap=True)


def need_serving_extra() -> None:
    """Refuse with one sentence where the extra libraries of serving are missing."""
    if importlib.util.find_spec("msgspec") is None or importlib.util.find_spec("aiohttp") is None:
        raise SlipstreamError(
            "serving needs its extra libraries: pip install 'slipstream[serving]'"
        )


def open_client(url: str, admin: bool = False) -> "Client":
    """Open a client with the key of the environment, that of operators where there is one."""
    from slipstream.serving.http.client import Client

    operator = os.environ.get(ADMIN_KEY_VARIABLE) if admin else None
    return Client(url, operator or os.environ.get(KEY_VARIABLE))
