"""A run: the directory of everything one training produced, and `train`, which fills it.

    recipe.yaml     the recipe, complete
    run.json        versions, machine, store, status, timings, figures
    metrics.jsonl   a line per logged step and per evaluation
    checkpoints/    step-… (the newest few) and best-…
    tensorboard/    the same figures as events

The same recipe and data in the same directory continue from the newest checkpoint; another recipe's
run is never overwritten. Touch this when a run starts, resumes or ends in another way.
"""

import contextlib
import fcntl
import functools
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

import slipstream
from slipstream.data.loader import PrefetchingLoader
from slipstream.data.sampler import TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, read_json, write_json
from slipstream.ops import native
from slipstream.ops.allocator import keep_freed_memory
from slipstream.training.checkpoint import BEST, LAST, latest, load_checkpoint, load_weights
from slipstream.training.device import find_device
from slipstream.training.loop import Progress, run_loop
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import Ranks, joined
from slipstream.training.recipe import Recipe, trained_digest
from slipstream.training.recommender import Recommender
from slipstream.training.recorder import Recorder
from slipstream.training.scheduled import recipe_steps
from slipstream.training.step_cost import predicted_cost

LOCK = ".lock"

Evaluate = Callable[
    [Recommender, SequenceStore, Recipe, Literal["validation", "test"]], dict[str, float]
]


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    directory: Path
    status: str  # finished, stopped early, interrupted
    step: int
    epoch: int
    metrics: dict[str, float]  # validation figures of the best evaluation
    best_step: int | None
    seconds: float  # of training, over all sessions of the run


def train(
    recipe: Recipe,
    store: SequenceStore,
    run_dir: str | os.PathLike[str],
    *,
    evaluate: Evaluate | None = None,
    quiet: bool = False,
    dtype: torch.dtype = torch.float32,
) -> RunResult:
    """Train `recipe` on `store` into `run_dir`, resuming what is there.

    Ctrl-C or SIGTERM ends it cleanly after a step. Under torchrun this is one of the ranks: they
    share the batch, the tables and the directory (a file system all of them see).
    """
    if recipe.sampler.max_len > recipe.model.max_len:
        raise SlipstreamError(
            f"sampler.max_len {recipe.sampler.max_len} is longer than model.max_len "
            f"{recipe.model.max_len}; "
            "make the model's at least as long"
        )
    if recipe.train.evaluate_every and evaluate is None:
        from slipstream.training.evaluation import evaluate as default_evaluate
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    keep_freed_memory()
    device = find_device(recipe.train.device)
    # Signals outermost: while a lost rank is being named, torchrun already stops the others.
    with (
        stop_signals() as stop,
        joined(recipe.train.mesh, recipe.train.rank_timeout, device) as ranks,
        contextlib.ExitStack() as held,
    ):
        if evaluate is None and recipe.train.evaluate_every:
            evaluate = functools.partial(default_evaluate, ranks=ranks)
        return _train(
            recipe,
            store,
            Path(run_dir),
            evaluate,
            ranks,
            stop,
            held,
            quiet=quiet,
            dtype=dtype,
            device=device,
        )


def _train(
    recipe: Recipe,
    store: SequenceStore,
    directory: Path,
    evaluate: Evaluate | None,
    ranks: Ranks,
    stop: threading.Event,
    held: contextlib.ExitStack,
    *,
    quiet: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> RunResult:
    """Run one rank's session: rank 0 opens the directory, every rank loads its part and trains."""

    def open_for_all() -> dict[str, Any]:
        directory.mkdir(parents=True, exist_ok=True)
        held.enter_context(sole_user(directory))
        sweep(directory)
        newest = latest(directory / "checkpoints")
        return {
            "earlier": open_directory(directory, recipe, store),
            "newest": None if newest is None else newest.name,
        }

    opened = ranks.on_first_rank(open_for_all)
    recommender = Recommender.build(recipe, store, dtype, ranks, device)
    held.callback(recommender.tables.close)
    recommender.tables.clear()
    optimizer = make_adamw(recommender.model, recipe.optimizer)
    loader = held.enter_context(PrefetchingLoader(make_sampler(recipe, store, ranks)))
    progress = Progress()
    if opened["newest"] is not None:
        state = load_checkpoint(
            directory / "checkpoints" / opened["newest"], recommender, optimizer, ranks
        )
        loader.load_state_dict(state["sampler"])
        progress = Progress(**state["progress"])

    def evaluate_validation() -> dict[str, float]:
        assert evaluate is not None
        recommender.tables.settle()
        figures = evaluate(recommender, store, recipe, "validation")
        return ranks.on_first_rank(lambda: figures)

    recorder = Recorder(
        directory, recommender, optimizer, loader, progress, quiet=quiet, ranks=ranks
    )
    evaluates = evaluate_validation if evaluate is not None else None
    return _run(recorder, evaluates, stop, opened["earlier"])


def _run(
    recorder: Recorder,
    evaluate: Callable[[], dict[str, float]] | None,
    stop: threading.Event,
    earlier: dict[str, Any],
) -> RunResult:
    """Run the loop; run.json holds its true status however it ends."""
    started, spent = time.perf_counter(), float(earlier.get("seconds", 0.0))
    progress, directory = recorder.progress, recorder.directory

    def record(status: str) -> float:
        seconds = spent + time.perf_counter() - started
        outcome = {
            "step": progress.step,
            "epoch": progress.epochs_done,
            "best_step": progress.best_step,
            "metrics": progress.best_metrics,
            "schedule": recorder.schedule,
        }
        if recorder.ranks.first:
            write_json(
                directory / "run.json", {**earlier, "status": status, "seconds": seconds, **outcome}
            )
        return seconds

    recorder.schedule = dict(earlier.get("schedule", {}))
    recorder.write_run = lambda: record("running")
    record("running")
    try:
        hooks, recipe = recorder.hooks(evaluate, stop), recorder.recommender.recipe
        with recipe_steps(recorder, stop) as steps:
            status = run_loop(recipe, steps, recorder.loader, progress, hooks, recorder.ranks)
        seconds = record(status)
    except BaseException as error:
        with contextlib.suppress(SlipstreamError):  # a full disk refuses this file too
            record("failed")
        if isinstance(error, OSError):
            raise SlipstreamError(
                f"could not write to {directory}: {error.strerror or error}; its checkpoints are "
                "whole"
            ) from error
        raise
    finally:
        recorder.close()
    recorder.line.print(closing_words(status, progress))
    return RunResult(
        directory,
        status,
        progress.step,
        progress.epochs_done,
        progress.best_metrics,
        progress.best_step,
        seconds,
    )


def make_sampler(recipe: Recipe, store: SequenceStore, ranks: Ranks) -> TrainingSampler:
    """Make the sampler of this rank's part of every batch."""
    return TrainingSampler(
        store,
        recipe.sampler,
        seed=recipe.seed,
        split=recipe.split,
        task=recipe.task,
        rank=ranks.rank,
        world_size=ranks.world,
        share_targets=recipe.task == "retrieval" and recipe.loss.draws_from_batch,
        cost=predicted_cost(recipe, store.num_items),
    )


def closing_words(status: str, progress: Progress) -> str:
    """Return the sentence that ends a run."""
    if status == "interrupted":
        return f"stopped after step {progress.step}; run the same command again to go on from there"
    figures = ", ".join(f"{name} {value:.4f}" for name, value in progress.best_metrics.items())
    best = f"; best at step {progress.best_step}: {figures}" if figures else ""
    return f"{status} after {progress.step} steps, {progress.epochs_done} epochs{best}"


def open_directory(directory: Path, recipe: Recipe, store: SequenceStore) -> dict[str, Any]:
    """Prepare the run's directory, new or the same run's; return what run.json will contain."""
    described = {
        "name": recipe.name,
        "trained_digest": trained_digest(recipe),
        "store": {"directory": str(store.directory), "digest": store.meta.get("digest")},
    }
    kept: dict[str, Any] = {"seconds": 0.0}
    if (directory / "run.json").exists():
        earlier = read_json(directory / "run.json")
        # Computed again from its recipe: earlier versions counted more as another run.
        if trained_digest(read_recipe(directory)) != described["trained_digest"]:
            raise SlipstreamError(
                f"{directory} holds a run of another recipe ('{earlier.get('name')}'); choose "
                "another directory or remove this one"
            )
        if earlier.get("store", {}).get("digest") != store.meta.get("digest"):
            raise SlipstreamError(
                f"{directory} holds a run on other data; choose another directory or remove this "
                "one"
            )
        kept = {
            "seconds": float(earlier.get("seconds", 0.0)),
            "schedule": earlier.get("schedule", {}),
        }
    elif latest(directory / "checkpoints") is not None:
        raise SlipstreamError(
            f"{directory} has checkpoints but no run.json, so whose they are is not known; choose "
            "another directory"
        )
    with atomic_file(directory / "recipe.yaml") as path:
        path.write_text(
            yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
        )
    return {**described, "recipe": recipe.model_dump(mode="json"), **versions(), **kept}


def sweep(directory: Path) -> None:
    """Remove half-written files of a killed session; only the holder of the lock may."""
    for place in (directory, directory / "checkpoints"):
        for path in place.glob(".*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)


def versions() -> dict[str, Any]:
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
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "kernels": native.status(),
        },
    }


def read_recipe(run_dir: str | os.PathLike[str]) -> Recipe:
    """Return the recipe a run was trained with."""
    run = read_json(Path(run_dir) / "run.json")
    try:
        return Recipe.model_validate(run["recipe"])
    except (KeyError, TypeError, ValueError) as error:
        raise SlipstreamError(
            f"{run_dir}/run.json holds no readable recipe: {str(error).splitlines()[0]}"
        ) from error


def open_run(
    run_dir: str | os.PathLike[str], store: SequenceStore | None = None, which: str = "best"
) -> tuple[Recipe, SequenceStore, Recommender]:
    """Open a run's recommender: its `best` weights (without evaluation the newest) or `last`."""
    recipe = read_recipe(run_dir)
    trained_on = read_json(Path(run_dir) / "run.json")["store"]
    store = store or SequenceStore.open(trained_on["directory"])
    if store.digest != trained_on["digest"]:
        raise SlipstreamError(
            f"{run_dir} was trained on other data than {store.directory} holds now, so its rows "
            "would mean other items; "
            "prepare that data again as it was"
        )
    checkpoints = Path(run_dir) / "checkpoints"
    found = (latest(checkpoints, BEST) if which == "best" else None) or latest(checkpoints, LAST)
    if found is None:
        raise SlipstreamError(
            f"{run_dir} has no checkpoint yet; train longer, or wait for the first one"
        )
    in_memory = {
        "tier": "memory" if recipe.tables.tier == "disk" else recipe.tables.tier,
        "directory": None,
    }
    recommender = Recommender.build(
        recipe.model_copy(update={"tables": recipe.tables.model_copy(update=in_memory)}), store
    )
    load_weights(found, recommender)
    return recipe, store, recommender


@contextlib.contextmanager
def sole_user(directory: Path) -> Iterator[None]:
    """Lock the run's directory for this process; the lock ends with the process."""
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlipstreamError(
                f"another process is training in {directory}; wait for it, or choose another "
                "directory"
            ) from error
        yield


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set the event at Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
