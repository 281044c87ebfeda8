"""What `slipstream ui` is given: addresses, bundles, runs, directories that hold them.

Touch this when the page should open something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.files import kind_of_directory, read_json
from slipstream.training.comparison import DEPTH

MOST_MODELS = 4  # of a directory that is searched: each is a fleet of its own


@dataclass
class Targets:
    """What the page shows: servers by name, bundles by name, one directory of runs."""

    servers: dict[str, str] = field(default_factory=dict)
    bundles: dict[str, Path] = field(default_factory=dict)
    runs: Path | None = None
    single_run: Path | None = None  # a run without a bundle, to be exported


def read_targets(given: Sequence[str]) -> Targets:
    """Tell what each target is; an error says what could be given instead."""
    found = Targets()
    for target in given:
        if target.startswith(("http://", "https://")):
            found.servers[_free(found, target.split("//", 1)[1].rstrip("/"))] = target.rstrip("/")
            continue
        path = Path(target)
        kind = kind_of_directory(path) if path.is_dir() else None
        if kind == "bundle":
            found.bundles[_free(found, path.resolve().name)] = path
        elif kind == "run":
            _set_runs(found, path)
            found.single_run = path
        elif kind in ("store", "tune") or not path.is_dir():
            raise SlipstreamError(
                f"'{target}' is no bundle, no run, no directory of runs and no address; give one "
                "of these, for example: slipstream ui runs"
            )
        else:
            _search(found, path)
    if found.bundles or found.servers:
        found.single_run = None
    return found


def _search(found: Targets, path: Path) -> None:
    """Take the runs and the bundles below a directory."""
    patterns = ["*/" * depth for depth in range(1, DEPTH + 1)]
    runs = any(next(path.glob(f"{pattern}run.json"), None) for pattern in patterns)
    bundles = sorted(
        {each.parent for pattern in patterns for each in path.glob(f"{pattern}bundle.json")},
        key=lambda each: -(each / "bundle.json").stat().st_mtime,
    )
    if not runs and not bundles:
        raise SlipstreamError(
            f"no run and no bundle is in {path}; train one with: slipstream train RECIPE data=DIR"
        )
    if runs:
        _set_runs(found, path)
    for bundle in bundles[:MOST_MODELS]:
        found.bundles[_free(found, bundle.relative_to(path).as_posix())] = bundle


def _set_runs(found: Targets, path: Path) -> None:
    if found.runs is not None:
        raise SlipstreamError(
            f"the page shows the runs of one directory, but {found.runs} and {path} were given; "
            "give a directory that holds both"
        )
    found.runs = path


def _free(found: Targets, name: str) -> str:
    """Return a name that no model has yet."""
    taken = {*found.servers, *found.bundles}
    free, number = name, 2
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free


def recipe_name(bundle: Path) -> str | None:
    """Return the name of the recipe that trained a bundle."""
    recipe = read_json(bundle / "bundle.json").get("recipe", {})
    return recipe.get("name")
