"""`slipstream demo`: from nothing to recommendations, every step a command you could have typed."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError

console = Console(highlight=False)


def register(app: typer.Typer) -> None:
    """Add this group's command."""
    app.command()(demo)


def demo(
    source: Annotated[
        Path | None,
        typer.Option(
            help="MovieLens latest-small on disk, for when MovieLens-1M cannot be downloaded."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where data, run and bundle go.")] = Path("runs/demo"),
    user: Annotated[
        str | None, typer.Option(help="Whose recommendations to show; default: the first user.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Change keys of the demo recipe, for example epochs=2."
        ),
    ] = None,
) -> None:
    """Prepare data, train HSTU for about two minutes, evaluate, export, and recommend to one user."""
    from slipstream import api
    from slipstream.cli.run_commands import show_metrics, show_recommendation

    data = demo_data(out, source)
    console.rule("train")
    run = api.train("demo", *(overrides or []), data=data, out=out / "run")
    console.rule("evaluate")
    show_metrics(run.evaluate("test"), "Test item, whole catalogue ranked, seen items filtered")
    console.rule("export")
    console.print(
        f"bundle {out / 'bundle'}, version {run.export(out / 'bundle')}; report "
        f"{run.directory / 'report.html'}"
    )
    console.rule("recommend")
    show_recommendation(run, user or str(run.store.users.id(0)), count=10, history=10)


def demo_data(out: Path, source: Path | None) -> Path:
    """MovieLens-1M where it can be had, else latest-small from `source`, else synthetic; says
    which.
    """
    from slipstream import api
    from slipstream.cli.data_commands import Ticker

    console.rule("data")
    choices: list[tuple[str, Path | None, str]] = [("ml-1m", None, "MovieLens-1M")]
    if source is not None:
        choices.append(("ml-latest-small", source, "MovieLens latest-small"))
    choices.append(("synthetic", None, "synthetic users"))
    for name, place, title in choices:
        target = out / name
        if (target / "store.json").exists():
            console.print(f"{title}, prepared before in {target}")
            return target
        try:
            with Ticker() as progress:
                api.prepare(name, target, source=place, progress=progress)
        except SlipstreamError as error:
            console.print(f"{title} cannot be had: {error}")
            continue
        console.print(f"{title}, prepared in {target}")
        return target
    raise SlipstreamError(f"no data could be prepared in {out}; see the reasons above")
