"""`slipstream ui`: the web page over bundles, runs and running servers.

Touch this when the page is started in another way; the page is in ui/.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.connection import console, need_serving_extra
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.data.store import SequenceStore
    from slipstream.serving.supervisor import Supervisor
    from slipstream.ui.targets import Targets

DEFAULT_TARGET = "runs"
START_SECONDS = 150.0


def ui(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help="Bundles, a run, a directory of runs and bundles, addresses of servers.",
            show_default="runs",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    instances: Annotated[int, typer.Option(min=1, max=64, help="Instances of each bundle.")] = 2,
    history: Annotated[
        str | None,
        typer.Option(
            help="History store of the people to show; unless given, one of their own, filled from "
            "--data and gone at the end."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared data whose people to show; the shown run's unless given."),
    ] = None,
    people: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many people of --data, evenly chosen.")
    ] = 1_000,
    allow_kill: Annotated[
        bool, typer.Option("--allow-kill", help="Let the page kill instances, to see them recover.")
    ] = False,
) -> None:
    """Show recommendations, runs, pipelines and the fleet on a web page of this machine.

    A bundle is served for the page by instances of its own. The page listens on 127.0.0.1 only.
    Ctrl-C ends it.

    Examples: slipstream ui runs; slipstream ui bundles/a bundles/b; slipstream ui
    http://127.0.0.1:8000 runs
    """
    need_serving_extra()
    from slipstream.serving.http.process import listening_socket
    from slipstream.ui.page_server import PageSettings, serve_page
    from slipstream.ui.targets import read_targets

    found = read_targets(targets or [DEFAULT_TARGET])
    try:
        bound = listening_socket("127.0.0.1", port)
    except OSError as error:
        raise SlipstreamError(
            f"cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another --port"
        ) from error
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with bound, tempfile.TemporaryDirectory(prefix="slipstream-ui-") as folder:
        if found.single_run is not None:
            found.bundles[found.single_run.resolve().name] = _export(found.single_run, Path(folder))
        if found.bundles and history is None:
            history = f"sqlite:{Path(folder) / 'history.db'}"
            _bring_people(found, data, people, history)
        with _serving(found.bundles, instances, history or "", allow_kill) as started:
            models = {**started, **found.servers}
            console.print(f"the page is at {url} (Ctrl-C ends)", style="bold")
            serve_page(
                PageSettings(
                    socket_fd=bound.detach(),
                    models=models,
                    runs=None if found.runs is None else str(found.runs.resolve()),
                    drain_seconds=2.0,
                )
            )
    console.print("goodbye")


def _export(run: Path, folder: Path) -> Path:
    """Write a run's bundle into a folder that is gone at the end."""
    from slipstream.api.trained_run import Run

    console.print(f"exporting {run} for the page", style="dim")
    return Run(run).export(folder / "bundle")


def _bring_people(found: "Targets", data: Path | None, most: int, history: str) -> None:
    """Fill a new history store with people of the prepared data, as far as it is known."""
    from slipstream.cli.history_commands import import_people

    store = _people_of(found, data)
    if store is None:
        console.print(
            "nobody's history is known: give --data DIR (prepared data) or --history to see people",
            style="dim",
        )
        return
    done = import_people(store, history, most)
    console.print(
        f"{done['users']:,} of {store.num_users:,} people of {store.directory} are on the page",
        style="dim",
    )


def _people_of(found: "Targets", data: Path | None) -> "SequenceStore | None":
    """Open the data given, or that of a shown run whose recipe trained a shown bundle."""
    from slipstream.data.store import SequenceStore
    from slipstream.training.comparison import find_runs
    from slipstream.training.run_directory import find_store
    from slipstream.ui.targets import recipe_name

    if data is not None:
        return SequenceStore.open(data)
    if found.runs is None:
        return None
    names = {recipe_name(bundle) for bundle in found.bundles.values()}
    for run in find_runs(found.runs):
        if run.name in names:
            with contextlib.suppress(SlipstreamError):
                return find_store(run.directory)
    return None


@contextlib.contextmanager
def _serving(
    bundles: dict[str, Path], instances: int, history: str, allow_kill: bool
) -> Iterator[dict[str, str]]:
    """Serve bundles on free ports of this machine; yields their addresses by name."""
    from slipstream.serving.start_checks import check_bundle
    from slipstream.serving.supervisor import DeploymentConfig, Supervisor

    supervisors: list[Supervisor] = []
    threads: list[threading.Thread] = []
    for bundle in bundles.values():
        check_bundle(bundle)
    try:
        for name, bundle in bundles.items():
            settings = {"bundle": str(bundle), "history": history, "allow_kill": allow_kill}
            plan = DeploymentConfig(
                instances,
                settings,
                router_settings={"allow_kill": allow_kill},
                drain_seconds=2.0,
                linger=0.1,
            )
            console.print(f"starting {instances} instances of {name}", style="dim")
            supervisors.append(Supervisor(plan, _quiet_log(name)))
            threads.append(threading.Thread(target=supervisors[-1].run, daemon=True))
            threads[-1].start()
        _await_all(supervisors, threads)
        yield dict(zip(bundles, (each.url for each in supervisors), strict=True))
    finally:
        for supervisor in supervisors:
            supervisor.stop()
        for thread in threads:
            thread.join(30)


def _quiet_log(name: str) -> Callable[[str], None]:
    """Return a log that tells of deaths and restarts, not of the start."""

    def log(sentence: str) -> None:
        if "is ready" not in sentence:
            console.print(f"{name}: {sentence}", style="dim")

    return log


def _await_all(supervisors: "list[Supervisor]", threads: list[threading.Thread]) -> None:
    end = time.monotonic() + START_SECONDS
    while not all(supervisor.all_ready for supervisor in supervisors):
        if time.monotonic() > end or not all(thread.is_alive() for thread in threads):
            raise SlipstreamError("a model could not be served; the lines above say why")
        time.sleep(0.05)
