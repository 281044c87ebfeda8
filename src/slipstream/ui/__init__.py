"""The web page and what it asks for beside the served models: runs, traces, slices, simulations.

    static/          the page: plain files, served as they are
    run_records.py   what the files of runs say
    page_endpoints.py, page_messages.py   the endpoints of the page's own process
    model_proxy.py   requests that go on to the servers of models
    page_server.py   all of it as one process

Touch this file when a public name is added.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.ui.page_server import PageSettings as PageSettings
    from slipstream.ui.page_server import serve_page as serve_page

__all__ = ["PageSettings", "page_directory", "serve_page"]
_load, _names = exporter(
    "slipstream.ui", {"PageSettings": "page_server", "serve_page": "page_server"}
)
__getattr__ = _load


def __dir__() -> list[str]:
    return sorted([*_names(), "page_directory"])


def page_directory() -> Path:
    """Return the directory of the page's files."""
    return Path(__file__).parent / "static"
