"""A run's directory: what it may hold, who may write it, and where its data are.

Touch this when a run keeps another file, or when a directory is recognised in another way.
"""

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import slipstream
from slipstream.config import check, flatten
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, check_output, kind_of_directory, read_json
from slipstream.machine import WAIT_POLICY
from slipstream.ops import native
from slipstream.training.checkpoint import BEST, LAST, latest
from slipstream.training.opened_rows import PREFIX as OPENED_ROWS
from slipstream.training.own_functions import NO_FUNCTIONS, OwnFunctions
from slipstream.training.recipe import Recipe, trained_digest

LOCK = ".lock"
NOTE = "run.json"
NUMBER_EDGES = "number_edges"  # of run.json: between the bins of numeric features, by table
WRITTEN = {
    *(LOCK, NOTE, "recipe.yaml", "metrics.jsonl", "checkpoints", "tensorboard"),
    *("report.html", "trace.json", "trace.png", "loggers.json", "wandb"),
}


class Replacement:
    """A run that was moved aside: it comes back unless the one in its place has started."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._aside: Path | None = None

    def move(self, directory: Path) -> None:
        """Move a run aside, next to where it is."""
        with sole_user(directory):
            try:
                self._aside = Path(
                    tempfile.mkdtemp(prefix=f".{directory.name}.replaced.", dir=directory.parent)
                )
                os.rename(directory, self._aside / directory.name)
            except OSError as error:
                raise SlipstreamError(
                    f"{directory} cannot be replaced: {error.strerror or error}; choose another "
                    "directory"
                ) from error
        self.directory = directory

    def discard(self) -> None:
        """Remove the run that was moved aside: the new one has started."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
        self.directory = self._aside = None

    def restore(self) -> None:
        """Put the run back, if the new one has not started."""
        if self._aside is None or self.directory is None:
            return
        shutil.rmtree(self.directory, ignore_errors=True)  # begun by us a moment ago
        os.rename(self._aside / self.directory.name, self.directory)
        self._aside.rmdir()
        self.directory = self._aside = None


def make_room(
    directory: Path,
    recipe: Recipe,
    store: SequenceStore,
    replaced: Replacement,
    own: OwnFunctions = NO_FUNCTIONS,
    *,
    force: bool,
) -> None:
    """Refuse a directory that this run must not write; with `force`, move another run aside."""
    if kind_of_directory(directory) == "run":
        check_output(directory, "run", force=True, inputs=[store.directory])
        difference = _difference(directory, recipe, store)
        if difference is None:
            own.check_resumed(directory, read_json(directory / NOTE))
            return
        if not force:
            raise SlipstreamError(
                f"{directory} holds a run {difference}; choose another directory, or give --force "
                "to replace it"
            )
        foreign = _foreign(directory)
        if foreign:
            raise SlipstreamError(
                f"{directory} holds '{foreign[0]}', which no run writes, so it is not replaced; "
                "choose another directory"
            )
        replaced.move(directory)
    elif latest(directory / "checkpoints") is not None:
        raise SlipstreamError(
            f"{directory} has checkpoints but no run.json, so whose they are is not known; choose "
            "another directory"
        )
    elif not (directory / LOCK).is_file() or _foreign(directory):
        # Else a session that ended before it had a run.json: ours, and nothing is lost.
        check_output(directory, "run", inputs=[store.directory])


def _difference(directory: Path, recipe: Recipe, store: SequenceStore) -> str | None:
    """Return in which way a directory's run is another than this one; None for the same."""
    earlier = read_json(directory / NOTE)
    # Computed again from its recipe: earlier versions counted more as another run.
    if trained_digest(read_recipe(directory)) != trained_digest(recipe):
        old, new = flatten(earlier["recipe"]), flatten(recipe.model_dump(mode="json"))
        changed = [
            f"{key} {old.get(key)} instead of {new.get(key)}"
            for key in {**old, **new}
            if old.get(key) != new.get(key) and key not in ("name", "data")
        ]
        return f"of another recipe ('{earlier.get('name')}'), with {', '.join(changed[:3])}"
    if not is_same_or_grown(store, earlier, recipe):
        return f"on other data ({earlier.get('store', {}).get('directory')})"
    return None


def is_same_or_grown(store: SequenceStore, run: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether a store is that of a run (its run.json), or grew from it: rows mean the same."""
    digest = run.get("store", {}).get("digest")
    if digest == store.meta.get("digest"):
        return True
    if digest not in store.ancestors:
        return False
    chosen = {f"item.{name}": store.item_features[name] for name in recipe.item_features}
    chosen |= {f"user.{name}": store.user_features[name] for name in recipe.user_features}
    for table, each in chosen.items():
        if each.kind == "number" and table not in run.get(NUMBER_EDGES, {}):
            raise SlipstreamError(
                f"the store has grown, and this run did not record the bins of the number "
                f"'{table}', which would move; start a new run"
            )
    return True


def _foreign(directory: Path) -> list[str]:
    """Return what of a directory no run writes."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name not in WRITTEN
        and not _is_temporary(path)
        and not path.name.startswith(OPENED_ROWS)
    )


def _is_temporary(path: Path) -> bool:
    """Whether a name is that of a file or checkpoint that was being written."""
    names = (*WRITTEN, LAST, BEST)
    return any(path.name.startswith((f".{name}.", f".{name}-")) for name in names)


def sweep(directory: Path) -> None:
    """Remove half-written files of a killed session; only the holder of the lock may."""
    for place in (directory, directory / "checkpoints"):
        for path in place.glob(".*"):
            if not _is_temporary(path):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def open_directory(
    directory: Path, recipe: Recipe, store: SequenceStore, own: OwnFunctions = NO_FUNCTIONS
) -> dict[str, Any]:
    """Write the recipe into a run's directory; return what run.json will contain."""
    place = store.directory.resolve()
    described = {
        "name": recipe.name,
        "trained_digest": trained_digest(recipe),
        "store": {
            "directory": str(place),
            "from_run": os.path.relpath(place, directory.resolve()),
            "digest": store.meta.get("digest"),
            "name": store.meta.get("source", {}).get("name"),
        },
        **({"functions": own.names} if own.names else {}),
    }
    kept: dict[str, Any] = {"seconds": 0.0}
    if (directory / NOTE).exists():
        earlier = read_json(directory / NOTE)
        kept = {
            "seconds": float(earlier.get("seconds", 0.0)),
            "schedule": earlier.get("schedule", {}),
            **{key: earlier[key] for key in (NUMBER_EDGES,) if key in earlier},
        }
    with atomic_file(directory / "recipe.yaml") as path:
        path.write_text(
            yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
        )
    return {**described, "recipe": recipe.model_dump(mode="json"), **kept}


def remove_unstarted(directory: Path) -> None:
    """Remove the directory of a new run that ended before its first step."""
    if not (directory / NOTE).exists():
        for name in ("recipe.yaml", LOCK):
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies there
            directory.rmdir()


def versions(ranks: int = 1) -> dict[str, Any]:
    """Return the versions and the machine of this session."""
    return {
        "versions": {
            "slipstream": slipstream.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "ranks": ranks,
            "waiting": os.environ.get(WAIT_POLICY, "default"),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "kernels": native.status(),
        },
    }


def recorded_threads(directory: Path, ranks: int) -> int | None:
    """Return the threads a run has used so far on as many ranks; bitwise repetition needs them."""
    if not (directory / NOTE).exists():
        return None
    machine = read_json(directory / NOTE).get("machine", {})
    return machine.get("threads") if machine.get("ranks", 1) == ranks else None


def read_recipe(run_dir: str | os.PathLike[str]) -> Recipe:
    """Return the recipe a run was trained with."""
    run = read_json(Path(run_dir) / NOTE)
    if not isinstance(run, dict) or not isinstance(run.get("recipe"), dict):
        raise SlipstreamError(f"{run_dir}/run.json holds no readable recipe: it has no recipe")
    return check(Recipe, run["recipe"], f"{run_dir}/run.json")


def find_store(
    run_dir: str | os.PathLike[str],
    given: SequenceStore | str | os.PathLike[str] | None = None,
) -> SequenceStore:
    """Open the data a run was trained on.

    They are where they were then, or where they are seen from the run's directory (both were
    moved together), or in the given place.
    """
    run = read_json(Path(run_dir) / NOTE)
    trained_on = run["store"]
    places = [Path(trained_on["directory"])]
    if "from_run" in trained_on:
        places.append(Path(run_dir) / trained_on["from_run"])
    if given is not None:
        found = [given if isinstance(given, SequenceStore) else SequenceStore.open(Path(given))]
    else:
        found = [SequenceStore.open(p) for p in places if kind_of_directory(p) == "store"]
    recipe = read_recipe(run_dir)
    for store in found:
        if is_same_or_grown(store, run, recipe):
            return store
    if found:
        raise SlipstreamError(
            f"{run_dir} was trained on other data than {found[0].directory} holds now, so its rows "
            "would mean other items; prepare that data again as it was, or give its directory "
            "with --data DIR"
        )
    raise SlipstreamError(
        f"the data of {run_dir} are not in {places[0]} any more; give their directory with "
        "--data DIR"
    )


@contextlib.contextmanager
def sole_user(directory: Path) -> Iterator[None]:
    """Lock a run's directory for this process; the lock ends with the process."""
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlipstreamError(
                f"another process works in {directory}; wait for it, or choose another directory"
            ) from error
        yield
