"""`slipstream demo`: from nothing to recommendations, each step also a command of its own.

Touch this when the demo should show another step; its recipe is recipes/demo.yaml.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError
from slipstream.files import check_output, kind_of_directory

console = Console(highlight=False)
KNOWN = {
    "ml-1m": "MovieLens-1M",
    "ml-latest-small": "MovieLens latest-small",
    "synthetic": "synthetic users",
}


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
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a run of another recipe that an earlier demo left."),
    ] = False,
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

    if kind_of_directory(out) is not None:
        raise SlipstreamError(
            f"{out} holds a {kind_of_directory(out)}, so the demo does not write into it; give "
            "another --out"
        )
    for name in KNOWN:
        check_output(out / name, "store", force=True)
    check_output(out / "bundle", "bundle", force=True)
    data = demo_data(out, source)
    console.rule("train")
    run = api.train_recipe("demo", *(overrides or []), data=data, out=out / "run", force=force)
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
    for name, title in KNOWN.items():
        place = source if name == "ml-latest-small" else None
        if name == "ml-latest-small" and source is None:
            continue
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
