"""Callbacks: what a caller wants done at the events of a run, such as sending figures elsewhere.

    class Notify(ss.training.Callback):
        def on_evaluation(self, session, figures, is_best):
            print(session.step, figures["HR@10"])

    ss.train(store, callbacks=[Notify()])

They are called on rank 0 only and change no number of the run. Touch this when a run tells its
callbacks something more; those that come with the package are in loggers.py.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.checkpoint import checkpoint_path
from slipstream.training.loop import Hooks, Progress
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe


@dataclass(frozen=True)
class TrainingSession:
    """The run as its callbacks see it, from a start or a resumption to the next end."""

    directory: Path
    recipe: Recipe
    total_steps: int  # of a run that nothing stops early; an estimate under a token budget
    progress: Progress
    stop_event: threading.Event

    @property
    def step(self) -> int:
        """The steps done, over all sessions."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """The whole epochs done."""
        return self.progress.epochs_done

    def stop(self) -> None:
        """End the session after this step, saved; the same command goes on from there."""
        self.stop_event.set()


class Callback:
    """What a run calls; inherit from it and write the methods you need.

    An object with some of these methods will do too.
    """

    def on_start(self, session: TrainingSession) -> None:
        """Called before the first step of a session; `session.step` is where it goes on."""

    def on_log(self, session: TrainingSession, figures: dict[str, Any]) -> None:
        """Called every `train.log_every` steps with loss, learning rate, speed and shares."""

    def on_evaluation(
        self, session: TrainingSession, figures: dict[str, float], is_best: bool
    ) -> None:
        """Called after a validation with its figures."""

    def on_checkpoint(self, session: TrainingSession, checkpoint: Path) -> None:
        """Called after a checkpoint was saved; background saving may still be writing it."""

    def on_end(self, session: TrainingSession, status: str) -> None:
        """Called at the end: finished, stopped early, interrupted or failed."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of one session. Every rank has one and calls it alike; rank 0's calls them."""

    def __init__(
        self, callbacks: Sequence[Callback], session: TrainingSession, ranks: Ranks = ALONE
    ) -> None:
        self.callbacks, self.session, self.ranks = callbacks, session, ranks
        self.wanted = bool(ranks.on_first_rank(lambda: len(callbacks)))
        self._failed: Callback | None = None

    def tell(self, event: str, *details: Any) -> None:
        """Call one method of every callback; an exception of one ends the run. Collective."""
        if self.wanted:
            self.ranks.on_first_rank(lambda: self._call(event, details))

    def end(self, status: str) -> None:
        """Tell rank 0's callbacks how the session ended; not collective, as a rank may be lost."""
        if self.wanted and self.ranks.first:
            self._call("on_end", (status,))

    def _call(self, event: str, details: tuple[Any, ...]) -> None:
        for callback in self.callbacks:
            if callback is self._failed:
                continue
            try:
                getattr(callback, event, lambda *_: None)(self.session, *details)
            except Exception as error:
                self._failed = callback
                told = str(error) or "no message"
                raise SlipstreamError(
                    f"callback {name_of(callback)} failed in {event} at step {self.session.step} "
                    f"({type(error).__name__}: {told}); correct it and run the same command again "
                    "to go on from the last checkpoint"
                ) from error

    def beside(self, hooks: Hooks, logged: Callable[[], dict[str, Any]]) -> Hooks:
        """Return hooks that do what `hooks` do and then tell the callbacks.

        `logged` returns the figures of the last line of metrics, speeds included.
        """
        if not self.wanted:
            return hooks

        def on_log(progress: Progress, record: dict[str, Any]) -> None:
            hooks.on_log(progress, record)
            self.tell("on_log", {**record, **logged()})

        def on_evaluation(progress: Progress, is_best: bool) -> None:
            hooks.on_evaluation(progress, is_best)
            self.tell("on_evaluation", dict(progress.metrics), is_best)

        def save(progress: Progress) -> None:
            hooks.save(progress)
            checkpoints = self.session.directory / "checkpoints"
            self.tell("on_checkpoint", checkpoint_path(checkpoints, progress.step))

        return replace(hooks, on_log=on_log, on_evaluation=on_evaluation, save=save)


def name_of(callback: object) -> str:
    """Return what an error calls a callback."""
    return type(callback).__name__


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return callbacks as a tuple; refuse what is none, and methods that nobody would call."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise SlipstreamError(f"callbacks is a list of callbacks, got {callbacks!r}")
    for callback in callbacks:
        if isinstance(callback, type):
            raise SlipstreamError(
                f"callbacks got the class {callback.__name__}; give an object: "
                f"{callback.__name__}()"
            )
        methods = [name for name in dir(callback) if name.startswith("on_")]
        for name in methods:
            if name not in EVENTS:
                raise SlipstreamError(
                    f"callback {name_of(callback)} has a method '{name}', which no run "
                    f"calls{did_you_mean(name, EVENTS)}"
                )
        if not methods:
            raise SlipstreamError(
                f"{callback!r} is no callback; write a class with one of {', '.join(EVENTS)}"
            )
    return tuple(callbacks)
