"""`slipstream demo`: from nothing to recommendations, each step also a command of its own.

Touch this when the demo should show another step; its recipe is recipes/demo.yaml.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError

console = Console(highlight=False)


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
    """Prepare data, train HSTU for about two minutes, evaluate, export and recommend."""
    from slipstream import api
    from slipstream.cli.run_commands import bundle_version, show_metrics, show_recommendation

    data = demo_data(out, source)
    console.rule("train")
    run = api.train("demo", *(overrides or []), data=data, out=out / "run")
    console.rule("evaluate")
    show_metrics(run.evaluate("test"), "Test item, whole catalogue ranked, seen items filtered")
    console.rule("export")
    bundle = run.export(out / "bundle", force=True)
    console.print(
        f"bundle {bundle}, version {bundle_version(bundle)}; report {run.directory / 'report.html'}"
    )
    console.rule("recommend")
    show_recommendation(run, user or str(run.store.users.id(0)), count=10, history=10)


def demo_data(out: Path, source: Path | None) -> Path:
    """Prepare MovieLens-1M, or else latest-small from `source`, or else synthetic data."""
    from slipstream import api
    from slipstream.progress import Ticker

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
            console.print(f"{title} is not available: {error}")
            continue
        console.print(f"{title}, prepared in {target}")
        return target
    raise SlipstreamError(f"no data could be prepared in {out}; see the reasons above")
