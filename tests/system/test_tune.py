"""`slipstream tune` and `train` by the command: killed and run again, they end alike."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slipstream.cli.app import run_command
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.training.callbacks import Callback
from slipstream.training.checkpoint import latest
from slipstream.training.run import train
from slipstream.training.telemetry import read_metrics
from tests.support.ranks_fixtures import run_ranks
from tests.support.shrunk_recipes import trained
from tests.support.training_fixtures import same_tensors, small_recipe, small_store

LONG = 250.0  # seconds; only ends a command that hangs
OVER = ["--over", "optimizer.lr=log(1e-3,1e-1)", "--over", "model.dropout=choice(0.0,0.2)"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe")
    store = small_store(place / "store")
    options = {"max_steps": 12, "epochs": 99, "evaluate_every": "3 steps", "checkpoint_every": 2}
    recipe = small_recipe(train=options)
    (place / "small.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return [str(place / "small.yaml"), f"data={store.directory}"]


def start(*words):
    command = [sys.executable, "-m", "slipstream", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(*words):
    """Run a command to its end, here: only what is killed must be a process of its own."""
    assert run_command([str(word) for word in words]) == 0


def kill_when_saved(process, run):
    """Kill a command as soon as a run has a checkpoint."""
    give_up = time.monotonic() + LONG
    while latest(run / "checkpoints") is None:
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def trials_of(out):
    return json.loads((out / "tune.json").read_text())["trials"]


@pytest.mark.slow
def test_a_killed_search_ends_as_the_undisturbed_one(words, tmp_path):
    search = ("tune", *words, *OVER, "--trials", "3", "--halving")
    finish(*search, "--out", tmp_path / "whole")
    kill_when_saved(start(*search, "--out", tmp_path / "cut"), tmp_path / "cut" / "trial-001")
    finish(*search, "--out", tmp_path / "cut")
    assert trials_of(tmp_path / "cut") == trials_of(tmp_path / "whole")
    for name in ("best.yaml", "report.html"):
        assert (tmp_path / "cut" / name).exists()
    best = max(trials_of(tmp_path / "whole"), key=lambda one: len(one["rungs"]))
    assert best["status"] == "finished" and best["step"] == 12
    runs = [out / f"trial-{best['number']:03d}" for out in (tmp_path / "cut", tmp_path / "whole")]
    assert same_tensors(*map(trained, runs))


def test_a_killed_run_that_evaluates_by_steps_ends_alike(words, tmp_path):
    finish("train", *words, "--out", tmp_path / "whole")
    kill_when_saved(start("train", *words, "--out", tmp_path / "cut"), tmp_path / "cut")
    finish("train", *words, "--out", tmp_path / "cut")
    found = [evaluations(tmp_path / name) for name in ("whole", "cut")]
    assert found[0] == found[1] and [step for step, _ in found[0]] == [3, 6, 9, 12]
    assert same_tensors(trained(tmp_path / "whole"), trained(tmp_path / "cut"))
    assert 'alt="Validation"' in (tmp_path / "cut" / "report.html").read_text()


def evaluations(run):
    lines = read_metrics(run / "metrics.jsonl")
    return [(line["step"], line["validation"]) for line in lines if "validation" in line]


def test_a_callback_that_fails_ends_both_ranks(tmp_path):
    small_store(tmp_path / "store")
    answers = run_ranks(2, f"{__name__}:fail_at_log", tmp_path / "ranks", place=str(tmp_path))
    assert all("callback Careless failed in on_log at step 2" in one["said"] for one in answers)
    assert [one["called"] for one in answers] == [1, 0]  # on rank 0 only


def fail_at_log(rank: int, world: int, place: str) -> dict[str, object]:
    """What one rank does: train with a callback that fails."""
    called = []

    class Careless(Callback):
        def on_log(self, session, figures):
            called.append(session.step)
            raise KeyError("HR@10")

    try:
        store, run = SequenceStore.open(Path(place) / "store"), Path(place) / "run"
        train(small_recipe(), store, run, quiet=True, callbacks=[Careless()])
    except SlipstreamError as error:
        return {"said": str(error), "called": len(called)}
    return {"said": "", "called": len(called)}
