"""What `slipstream serve` checks before it starts a process: the bundle's files, the history store.

A fault found here is one sentence; found later it would be an instance that dies again and again.
Touch this when an instance opens something else.
"""

import asyncio
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.history.history_store import open_history_store


def check_bundle(directory: Path) -> None:
    """Refuse what is no bundle, or one whose description, vocabulary or weights are damaged."""
    from safetensors import SafetensorError, safe_open

    from slipstream.bundle import DESCRIPTION, ITEMS, WEIGHTS
    from slipstream.serving.engine.items import ItemIds

    if not (directory / DESCRIPTION).is_file():
        raise SlipstreamError(
            f"{directory} is not a bundle (no {DESCRIPTION}); make one with `slipstream export RUN "
            f"--out {directory}`"
        )
    description = read_json(directory / DESCRIPTION)
    if not isinstance(description, dict) or not {"version", "recipe", "sizes"} <= set(description):
        raise SlipstreamError(
            f"{directory / DESCRIPTION} is not the description of a bundle; export it again"
        )
    ItemIds(directory / ITEMS)
    try:
        with safe_open(directory / WEIGHTS, framework="pt"):
            pass  # opening checks the header and the length of the file
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(
            f"the weights of bundle {directory} cannot be read ({error}); export it again"
        ) from error


def check_history(url: str) -> None:
    """Refuse a history store that cannot be opened or does not answer."""

    async def answer() -> None:
        store = open_history_store(url)
        try:
            await store.check()
        finally:
            await store.close()

    asyncio.run(answer())
