"""A run: the directory of everything one training produced, and `train`, which fills it.

    recipe.yaml     the recipe, complete
    run.json        versions, machine, store, status, timings, figures
    metrics.jsonl   a line per logged step and per evaluation
    checkpoints/    step-… (the newest few) and best-…
    tensorboard/    the same figures as events

The same recipe and data in the same directory continue from the newest checkpoint, also where the
data has grown since (`slipstream data append`); another run is replaced only by force. Touch this
when a run starts, resumes or ends in another way; what a directory may hold is in run_directory.py.
"""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.data.loader import PrefetchingLoader
from slipstream.data.sampler import TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.machine import choose_threads
from slipstream.ops.allocator import keep_freed_memory
from slipstream.training.callbacks import Callback, Callbacks, TrainingSession, check_callbacks
from slipstream.training.checkpoint import (
    BEST,
    LAST,
    latest,
    load_checkpoint,
    load_weights,
    read_state,
)
from slipstream.training.device import find_device
from slipstream.training.fitted_recipe import fit_recipe
from slipstream.training.loggers import make_loggers
from slipstream.training.loop import Progress, run_loop, total_steps
from slipstream.training.opened_rows import directory_for_rows, in_files, keeps_files, let_go
from slipstream.training.optimizers import make_adamw
from slipstream.training.own_functions import NO_FUNCTIONS, OwnFunctions
from slipstream.training.popularity import BASELINE
from slipstream.training.ranks import Ranks, joined
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.recorder import Recorder
from slipstream.training.report import COUNTS, SHARES
from slipstream.training.run_directory import (
    NUMBER_EDGES,
    Replacement,
    find_store,
    make_room,
    open_directory,
    read_recipe,
    recorded_threads,
    remove_unstarted,
    sole_user,
    sweep,
    versions,
)
from slipstream.training.scheduled import recipe_steps
from slipstream.training.step_cost import predicted_cost

Evaluate = Callable[
    [Recommender, SequenceStore, Recipe, Literal["validation", "test"]], dict[str, float]
]

_STOPS: list[threading.Event] = []  # of every `stop_signals` that is open


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
    own: OwnFunctions = NO_FUNCTIONS,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train `recipe` on `store` into `run_dir`, resuming what is there.

    A recipe that leaves keys to the data (`fit_to_data`) is completed first.
    A run of another recipe or of other data is refused, or replaced by `force`. Rank 0 calls the
    `callbacks` and the loggers of the recipe. Ctrl-C or SIGTERM ends it cleanly after a step. Under
    torchrun this is one of the ranks: they share the batch, the tables and the directory (a file
    system all of them see).
    """
    recipe, fitted = fit_recipe(recipe, store, Path(run_dir))
    if recipe.sampler.max_len > recipe.model.max_len:
        raise SlipstreamError(
            f"sampler.max_len {recipe.sampler.max_len} is longer than model.max_len "
            f"{recipe.model.max_len}; "
            "make the model's at least as long"
        )
    own.check(recipe)
    callbacks = (*check_callbacks(callbacks), *make_loggers(recipe.train.loggers))
    if recipe.train.evaluate_every and evaluate is None:
        from slipstream.training.evaluation import evaluate as default_evaluate
    keep_freed_memory()
    device = find_device(recipe.train.device)
    # Signals outermost: while a lost rank is being named, torchrun already stops the others.
    with (
        stop_signals() as stop,
        joined(recipe.train.mesh, recipe.train.rank_timeout, device) as ranks,
        contextlib.ExitStack() as held,
    ):
        if evaluate is None and recipe.train.evaluate_every:
            evaluate = functools.partial(default_evaluate, ranks=ranks, own=own)
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
            own=own,
            force=force,
            callbacks=callbacks,
            fitted=fitted,
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
    own: OwnFunctions,
    force: bool,
    callbacks: Sequence[Callback],
    fitted: dict[str, Any],
) -> RunResult:
    """Run one rank's session: rank 0 opens the directory, every rank loads its part and trains."""
    replaced = Replacement()
    opened = ranks.on_first_rank(
        lambda: _open_run(
            directory, recipe, store, replaced, held, world=ranks.world, own=own, force=force
        )
    )
    held.callback(torch.set_num_threads, torch.get_num_threads())
    reason = set_threads(recipe.train.threads or opened["threads"])
    edges = opened["earlier"].get(NUMBER_EDGES)
    recommender = Recommender.build(recipe, store, dtype, ranks, device, edges)
    if own.loss is not None:
        recommender.loss_per_token = own.loss_per_token
    held.callback(recommender.tables.close)
    recommender.tables.clear()
    optimizer = make_adamw(recommender.model, recipe.optimizer)
    loader = held.enter_context(
        PrefetchingLoader(make_sampler(recipe, store, ranks), merge=recipe.train.accumulate)
    )
    progress, newest = Progress(), None
    if opened["newest"] is not None:
        newest = directory / "checkpoints" / opened["newest"]
        state = load_checkpoint(newest, recommender, optimizer, ranks)
        loader.load_state_dict(state["sampler"])
        progress = Progress(**state["progress"])
        if state["sampler"].get("store") != store.digest:
            progress = progress.on_grown_data()

    def evaluate_validation() -> dict[str, float]:
        assert evaluate is not None
        recommender.tables.settle()
        figures = evaluate(recommender, store, recipe, "validation")
        return ranks.on_first_rank(lambda: figures)

    recorder = Recorder(
        directory,
        recommender,
        optimizer,
        loader,
        progress,
        quiet=quiet,
        ranks=ranks,
        resumed_from=newest,
    )
    if newest is not None:
        recorder.line.print(
            f"resuming {directory} from step {progress.step:,} (epoch {progress.epochs_done + 1})"
        )
    elif fitted:
        chosen = ", ".join(f"{key}={value}" for key, value in fitted.items())
        recorder.line.print(f"fitted to the data: {chosen}")
    if reason:
        recorder.line.print(f"{reason}; train.threads chooses another number")
    evaluates = evaluate_validation if evaluate is not None else None
    earlier = {**opened["earlier"], **versions(ranks.world)}
    earlier |= {NUMBER_EDGES: found} if (found := recommender.features.number_edges()) else {}
    in_all = total_steps(recipe, loader.steps_per_epoch)
    session = TrainingSession(directory, recipe, in_all, progress, stop)
    called = Callbacks(callbacks, session, ranks)
    return _run(recorder, evaluates, stop, earlier, replaced, called)


def _open_run(
    directory: Path,
    recipe: Recipe,
    store: SequenceStore,
    replaced: Replacement,
    held: contextlib.ExitStack,
    *,
    world: int,
    own: OwnFunctions,
    force: bool,
) -> dict[str, Any]:
    """Open a run's directory for all ranks: what is known of an earlier session is returned."""
    make_room(directory, recipe, store, replaced, own, force=force)
    held.callback(replaced.restore)
    if not directory.exists():
        held.callback(remove_unstarted, directory)
    directory.mkdir(parents=True, exist_ok=True)
    held.enter_context(sole_user(directory))
    sweep(directory)
    newest = latest(directory / "checkpoints")
    threads = recorded_threads(directory, world)
    return {
        "earlier": open_directory(directory, recipe, store, own),
        "newest": None if newest is None else newest.name,
        "threads": None if newest is None else threads,
    }


def set_threads(count: int | None) -> str:
    """Compute with `count` threads, else with what is free; return why where that is said."""
    reason = ""
    if count is None:
        count, reason = choose_threads(torch.get_num_threads())
    torch.set_num_threads(count)
    return reason


def _run(
    recorder: Recorder,
    evaluate: Callable[[], dict[str, float]] | None,
    stop: threading.Event,
    earlier: dict[str, Any],
    replaced: Replacement,
    called: Callbacks,
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
    replaced.discard()
    try:
        called.tell("on_start")
        hooks = called.beside(recorder.hooks(evaluate, stop), lambda: recorder.logged)
        recipe = recorder.recommender.recipe
        with recipe_steps(recorder, stop) as steps:
            status = run_loop(recipe, steps, recorder.loader, progress, hooks, recorder.ranks)
        recorder.checkpoints.wait()
        seconds = record(status)
        called.end(status)
    except BaseException as error:
        with contextlib.suppress(SlipstreamError):  # a full disk refuses this file too
            record("failed")
        with contextlib.suppress(SlipstreamError):
            called.end("failed")
        recorder.close(failed=True)
        if isinstance(error, OSError):
            raise SlipstreamError(
                f"could not write to {directory}: {error.strerror or error}; its checkpoints are "
                "whole"
            ) from error
        raise
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
    figures = ", ".join(
        f"{name} {value:.4f}"
        for name, value in progress.best_metrics.items()
        if not name.startswith(BASELINE) and name not in COUNTS + SHARES
    )
    best = f"; best at step {progress.best_step}: {figures}" if figures else ""
    return f"{status} after {progress.step} steps, {progress.epochs_done} epochs{best}"


def open_run(
    run_dir: str | os.PathLike[str],
    store: SequenceStore | str | os.PathLike[str] | None = None,
    which: str = "best",
) -> tuple[Recipe, SequenceStore, Recommender]:
    """Open a run's recommender: its `best` weights (without evaluation the newest) or `last`.

    Rows that were in files at training are in files again, so they may be larger than memory.
    Without a `store` (or its directory) the data are looked for where they were at training.
    """
    recipe = read_recipe(run_dir)
    store = find_store(run_dir, store)
    recorded = read_json(Path(run_dir) / "run.json")
    trained_on = recorded["store"]
    checkpoints = Path(run_dir) / "checkpoints"
    found = latest(checkpoints, BEST) if which == "best" else None
    if (
        found is not None
        and read_state(found).get("store", trained_on["digest"]) != (trained_on["digest"])
    ):
        found = None  # it was the best of the store before it grew
    found = found or latest(checkpoints, LAST)
    if found is None:
        raise SlipstreamError(
            f"{run_dir} has no checkpoint yet; train longer, or wait for the first one"
        )
    edges = recorded.get(NUMBER_EDGES)
    if not keeps_files(recipe):
        recommender = Recommender.build(recipe, store, edges=edges)
        load_weights(found, recommender)
        return recipe, store, recommender
    with directory_for_rows(Path(run_dir), recipe) as directory:
        recommender = Recommender.build(in_files(recipe, directory), store, edges=edges)
        try:
            load_weights(found, recommender)
            let_go(recommender)
        except BaseException:
            recommender.tables.close()
            raise
    return recipe, store, recommender


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set the event at Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once.

    Around several runs it is set with the event of the one that runs.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        for each in _STOPS:
            each.set()

    _STOPS.append(stop)
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        _STOPS.remove(stop)
        for number, handler in before.items():
            signal.signal(number, handler)
