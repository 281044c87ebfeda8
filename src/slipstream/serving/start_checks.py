"""What `slipstream serve` checks before it starts a process: the bundle's files, the history store.

A fault found here is one sentence; found later it would be an instance that dies again and again.
Touch this when an instance opens something else.
"""

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.files import read_json
from slipstream.history.history_store import (
    HistoryStoreError,
    open_history_store,
    url_without_password,
)
from slipstream.serving.http.process import CANNOT_START, listening_socket
from slipstream.serving.instance.instance_config import SEARCHES
from slipstream.serving.shelf_directory import find_shared_memory


def check_bundle(directory: Path, task: str | None = None) -> None:
    """Refuse what is no bundle, or one whose description, vocabulary or weights are damaged.

    With `task`, a bundle for another one is refused too.
    """
    from safetensors import SafetensorError, safe_open

    from slipstream.bundle import DESCRIPTION, ITEMS, WEIGHTS, read_bundle
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
    if task not in (None, description["recipe"]["task"]):
        raise SlipstreamError(
            f"{directory} is a bundle for {description['recipe']['task']}; --{task} takes one that "
            f"was trained with task: {task}"
        )
    ItemIds(directory / ITEMS)
    try:
        with safe_open(directory / WEIGHTS, framework="pt"):
            pass  # opening checks the header and the length of the file
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(
            f"the weights of bundle {directory} cannot be read ({error}); export it again"
        ) from error
    read_bundle(directory)  # checks the digests of description and vocabulary


def check_bundle_apart(directory: Path, task: str | None = None) -> None:
    """Do `check_bundle` in a process of its own, so that this one stays small and ends at once."""
    command = [sys.executable, "-m", "slipstream.serving.start_checks", str(directory)]
    command += [] if task is None else [task]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode == CANNOT_START:
        raise SlipstreamError(done.stderr.strip())
    if done.returncode:
        raise SlipstreamError(
            f"the check of bundle {directory} failed unexpectedly:\n{done.stderr.strip()}"
        )


def check_search(kind: str) -> None:
    """Refuse a way to search a catalogue that is not known, or not installed."""
    if kind not in SEARCHES:
        raise SlipstreamError(
            f"--search {kind} is not known{did_you_mean(kind, SEARCHES)}; choose one of "
            f"{', '.join(SEARCHES)}"
        )
    if kind != "exact" and importlib.util.find_spec("faiss") is None:
        raise SlipstreamError(
            f"--search {kind} needs an extra library: pip install 'slipstream[faiss]', or search "
            "exactly"
        )


def check_traces(endpoint: str | None) -> None:
    """Refuse traces without their libraries, or to what is no address."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise SlipstreamError(
            f"'{endpoint}' is no address for traces; write it like http://HOST:4318/v1/traces"
        )
    if importlib.util.find_spec("opentelemetry") is None:
        raise SlipstreamError("traces need their extra libraries: pip install 'slipstream[traces]'")


def show_checks(
    history: str | None, host: str, port: int, host_mb: int, show: Callable[[str], None]
) -> None:
    """Check the history store, the address and shared memory, a line each; refuse a fault."""
    if history is not None:  # a router alone opens neither
        show("bundle: it opens")
        check_history(history)
        show(f"history: {url_without_password(history)} answers")
    try:
        listening_socket(host, port).close()
    except OSError as error:
        raise SlipstreamError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from error
    show(f"address: {host}:{port} is free")
    place = find_shared_memory()
    free = shutil.disk_usage(place).free >> 20
    enough = "enough for" if free > host_mb else "the host tiers will be smaller than"
    show(f"shared memory: {free} MiB free in {place}, {enough} {host_mb} MiB")
    show("everything a start needs is there")


def find_store_fault(url: str) -> HistoryStoreError | None:
    """Return why a history store does not answer now; refuse one that never will.

    A server starts without its store: requests that send their history need none.
    """
    try:
        check_history(url)
    except HistoryStoreError as error:
        if not error.temporary:
            raise
        return error
    return None


def check_history(url: str) -> None:
    """Refuse a history store that cannot be opened or does not answer."""

    async def answer() -> None:
        store = open_history_store(url)
        try:
            await store.check()
        finally:
            await store.close()

    asyncio.run(answer())


def main(directory: str, task: str | None = None) -> None:
    """Check one bundle; its fault is the only line on stderr."""
    try:
        check_bundle(Path(directory), task)
    except SlipstreamError as error:
        print(error, file=sys.stderr)
        sys.stderr.flush()
        os._exit(CANNOT_START)
    os._exit(0)  # torch takes a second to leave in good order


if __name__ == "__main__":
    main(*sys.argv[1:3])
