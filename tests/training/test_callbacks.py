"""Callbacks are called at the events of a run, change nothing, and fail in one sentence."""

import json

import pytest

from slipstream.errors import SlipstreamError
from slipstream.training.callbacks import EVENTS, Callback, check_callbacks
from slipstream.training.run import train
from tests.support.training_fixtures import (
    growing,
    same_tensors,
    saved_tensors,
    small_recipe,
    small_store,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


class Recording(Callback):
    """Keeps what it is told."""

    def __init__(self):
        self.events = []

    def on_start(self, session):
        self.events.append(("start", session.step))
        self.total_steps = session.total_steps

    def on_log(self, session, figures):
        self.events.append(("log", session.step))
        self.figures = figures

    def on_evaluation(self, session, figures, is_best):
        self.events.append(("evaluation", session.step, figures["HR@10"], is_best))

    def on_checkpoint(self, session, checkpoint):
        self.events.append(("checkpoint", session.step, checkpoint.name))

    def on_end(self, session, status):
        self.events.append(("end", session.step, status))


class Stopping:
    """Ends a session at its first evaluation; needs no base class."""

    def on_evaluation(self, session, figures, is_best):
        session.stop()


RECIPE = small_recipe(train={"epochs": 9, "max_steps": 4, "evaluate_every": "2 steps"})


def run_small(store, directory, *callbacks):
    evaluate = growing([0.3, 0.1])
    return train(RECIPE, store, directory, evaluate=evaluate, quiet=True, callbacks=callbacks)


def test_a_callback_is_told_of_every_event(store, tmp_path):
    told = Recording()
    run_small(store, tmp_path / "run", told)
    assert told.events == [
        ("start", 0),
        ("log", 2),
        ("evaluation", 2, 0.3, True),
        ("checkpoint", 2, "step-00000002"),
        ("log", 4),
        ("evaluation", 4, 0.1, False),
        ("checkpoint", 4, "step-00000004"),
        ("end", 4, "finished"),
    ]
    assert told.total_steps == 4
    assert {"loss", "lr", "tokens_per_second", "mfu"} <= told.figures.keys()


def test_a_session_that_a_callback_stops_goes_on_exactly(store, tmp_path):
    told = Recording()
    run_small(store, tmp_path / "whole")
    stopped = run_small(store, tmp_path / "cut", Stopping())
    assert (stopped.status, stopped.step) == ("interrupted", 2)
    evaluate = growing([0.1])
    train(RECIPE, store, tmp_path / "cut", evaluate=evaluate, quiet=True, callbacks=[told])
    assert told.events[0] == ("start", 2)
    assert same_tensors(saved_tensors(tmp_path / "cut"), saved_tensors(tmp_path / "whole"))


def test_a_callback_that_fails_ends_the_run_in_one_sentence(store, tmp_path):
    class Careless(Callback):
        def on_log(self, session, figures):
            raise KeyError("HR@10")

    other = Recording()
    expected = r"callback Careless failed in on_log at step 2 \(KeyError: 'HR@10'\)"
    with pytest.raises(SlipstreamError, match=expected):
        run_small(store, tmp_path / "run", Careless(), other)
    assert other.events == [("start", 0), ("end", 2, "failed")]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert run_small(store, tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Recording(), "callbacks is a list"),
        ([Recording], r"give an object: Recording\(\)"),
        ([3], "3 is no callback; write a class with one of on_start"),
        ([type("Near", (), {"on_evaluate": 1})()], "did you mean 'on_evaluation'"),
    ],
)
def test_what_is_no_callback_is_refused(given, message):
    with pytest.raises(SlipstreamError, match=message):
        check_callbacks(given)


def test_every_event_has_a_method():
    assert EVENTS == ("on_start", "on_log", "on_evaluation", "on_checkpoint", "on_end")
