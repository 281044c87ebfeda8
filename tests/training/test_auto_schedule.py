"""`train.schedule=auto`: the plain loop's training, whatever is tried, chosen or resumed."""

import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch

from slipstream.pipeline import adaptive
from slipstream.pipeline.schedule import make_schedule
from slipstream.training import auto_schedule, loop
from slipstream.training.auto_schedule import Phase, plain_reason, possible_schedules
from slipstream.training.checkpoint import checkpoint_path
from slipstream.training.device import HOST
from slipstream.training.loop import PlainSteps
from slipstream.training.ranks import Ranks
from slipstream.training.recipe import trained_digest
from slipstream.training.recommender import Recommender
from slipstream.training.run import train
from slipstream.training.scheduled import RecommenderWork
from tests.support.pipeline_problem import lanes_left
from tests.support.training_fixtures import (
    logged_losses,
    same_tensors,
    saved_tensors,
    small_recipe,
    small_store,
)

pytestmark = pytest.mark.system  # whole runs: too long for a unit test


@pytest.fixture
def store(tmp_path):
    return small_store(tmp_path / "store")


def on_disk(tmp_path, name, schedule="auto", loss=(), **options):
    """A recipe whose rows are on disk, of 48 steps, with evaluations in between."""
    train_options = {"epochs": 24, "checkpoint_every": 7, "log_every": 1, **options}
    return small_recipe(
        tables={"tier": "disk", "directory": str(tmp_path / f"rows-{name}")},
        loss={"negatives": 5, **dict(loss)},
        optimizer={"decay": "cosine", "warmup_steps": 3},
        train={"schedule": schedule, "evaluate_every": 11, **train_options},
    )


def run_of(directory):
    return json.loads((directory / "run.json").read_text())


def scripted(*attempts, choice):
    """A search that tries what a test says and returns the choice of the test."""

    def search(candidates):
        for schedule, steps in attempts:
            yield adaptive.Attempt(schedule, steps)
        return adaptive.Choice(choice, "schedule: as the test says")

    return search


SLOW_FROM = 24  # the step from which reads are slow, in the test of drifting shares
CUT = make_schedule("nested", micro_batches=3)
TRIES = ((None, 2), (make_schedule("dual_buffer"), 2), (CUT, 3), (None, 1))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    monkeypatch.setattr(adaptive, "search", scripted(*TRIES, choice=CUT))


def interrupt(monkeypatch, *steps):
    """Ask each next session to stop after a step."""
    stops, real = iter(steps), loop.run_loop

    def stopped(recipe, made, loader, progress, hooks, ranks):
        at, on_step = next(stops, None), hooks.on_step
        hooks.on_step = lambda progress, batch: (
            on_step(progress, batch),
            hooks.stop.set() if progress.step == at else None,
        )
        return real(recipe, made, loader, progress, hooks, ranks)

    monkeypatch.setattr("slipstream.training.run.run_loop", stopped)


def test_a_short_run_tries_no_schedule_that_cuts_batches(store, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    given = []

    def search(candidates):
        given.append([schedule.name for schedule in candidates])
        yield adaptive.Attempt(None, 1)
        return adaptive.Choice(None, "schedule: as the test says")

    monkeypatch.setattr(adaptive, "search", search)
    for enough in (10_000, 1):
        monkeypatch.setattr(auto_schedule, "FEWEST_TO_CUT", enough)
        recipe = on_disk(tmp_path, f"{enough}", max_steps=12, evaluate_every=0)
        train(recipe, store, tmp_path / f"{enough}", quiet=True)
    assert given == [["dual_buffer"], ["dual_buffer", "nested"]]


def test_a_stalled_step_decides_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    found, real = {}, PlainSteps.next

    def stalled(steps, step):
        time.sleep(0.5 if step == stall_at else 0.0)
        return real(steps, step)

    def search(candidates):
        found[stall_at] = (yield adaptive.Attempt(None, 16)).seconds
        return adaptive.Choice(None, "schedule: as the test says")

    monkeypatch.setattr(PlainSteps, "next", stalled)
    monkeypatch.setattr(adaptive, "search", search)
    for stall_at in (None, 9):
        recipe = on_disk(tmp_path, f"{stall_at}", evaluate_every=0)
        train(recipe, store, tmp_path / f"{stall_at}", quiet=True)
    assert found[9] < 3 * found[None]  # with the stalled step it is ten times as much and more


def test_a_hopeless_try_ends_after_its_first_measured_step(store, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)

    def search(candidates):
        trial = yield adaptive.Attempt(None, 2)
        yield adaptive.Attempt(CUT, 20, give_up=0.0)
        yield adaptive.Attempt(CUT, 6, give_up=1e9 * trial.seconds)
        return adaptive.Choice(None, "schedule: as the test says")

    monkeypatch.setattr(adaptive, "search", search)
    train(on_disk(tmp_path, "auto", evaluate_every=0), store, tmp_path / "auto", quiet=True)
    begins = [phase["step"] for phase in run_of(tmp_path / "auto")["schedule"]["phases"]]
    taken = [after - before for before, after in itertools.pairwise(begins)]
    assert taken[1] == adaptive.WARM_UP + 1
    assert taken[2] >= adaptive.WARM_UP + 6


def test_negatives_in_segments_follow_every_change_of_schedule(store, tmp_path, script):
    segments = {"fetch": "segmented", "segment_bytes": 4096}
    for name, schedule in (("auto", "auto"), ("plain", "synchronous")):
        recipe = on_disk(tmp_path, name, schedule, segments, epochs=10, max_steps=18)
        train(recipe, store, tmp_path / name, quiet=True, dtype=torch.float64)
    auto, plain = (saved_tensors(tmp_path / name) for name in ("auto", "plain"))
    assert max(float((auto[k].double() - plain[k].double()).abs().max()) for k in plain) < 1e-9
    phases = run_of(tmp_path / "auto")["schedule"]["phases"]
    assert {phase["schedule"] for phase in phases} == {"synchronous", "dual_buffer", "nested"}


def test_a_real_search_trains_what_the_plain_loop_trains(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    monkeypatch.setattr(auto_schedule, "FEWEST_TO_CUT", 1)
    monkeypatch.setattr(adaptive, "WORTH_TRYING", 0.0)  # small steps have little to hide
    for name, schedule in (("auto", "auto"), ("plain", "synchronous")):
        recipe = on_disk(tmp_path, name, schedule, epochs=40, checkpoint_every=50)
        train(recipe, store, tmp_path / name, dtype=torch.float64)
    auto, plain = (saved_tensors(tmp_path / name) for name in ("auto", "plain"))
    assert max(float((auto[k].double() - plain[k].double()).abs().max()) for k in plain) < 1e-9
    assert logged_losses(tmp_path / "auto") == [
        (step, pytest.approx(loss, abs=1e-9)) for step, loss in logged_losses(tmp_path / "plain")
    ]
    phases = run_of(tmp_path / "auto")["schedule"]["phases"]
    tried = [phase["schedule"] for phase in phases]
    assert tried[:3] == ["synchronous", "dual_buffer", "nested"] and phases[-1]["chosen"]
    assert capsys.readouterr().err.count("schedule: ") == 1 and not lanes_left()


def test_what_is_tried_without_a_cut_leaves_the_bits_of_the_plain_loop(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    whole = make_schedule("dual_buffer", buffers_ahead=2)
    tries = ((None, 2), (whole, 3), (None, 2), (make_schedule("dual_buffer"), 2))
    monkeypatch.setattr(adaptive, "search", scripted(*tries, choice=whole))
    for name, schedule in (("auto", "auto"), ("plain", "synchronous")):
        train(on_disk(tmp_path, name, schedule), store, tmp_path / name, quiet=True)
    assert same_tensors(*(saved_tensors(tmp_path / name) for name in ("auto", "plain")))
    assert logged_losses(tmp_path / "auto") == logged_losses(tmp_path / "plain")


def test_a_resumed_run_follows_the_choice_bit_for_bit(store, tmp_path, script, monkeypatch, capsys):
    train(on_disk(tmp_path, "whole"), store, tmp_path / "whole", quiet=True)
    phases = run_of(tmp_path / "whole")["schedule"]["phases"]
    chosen = phases[-1]["step"]
    assert 16 <= chosen < 24
    assert Phase(**phases[-1]) == Phase(chosen, "nested", micro_batches=3, buffers=1, chosen=True)
    interrupt(monkeypatch, chosen + 2, chosen + 11)
    recipe = on_disk(tmp_path, "cut")
    statuses = [train(recipe, store, tmp_path / "cut").status for _ in range(3)]
    assert statuses == ["interrupted", "interrupted", "finished"]
    assert "schedule: nested with 3 micro-batches, as chosen before" in capsys.readouterr().err
    assert run_of(tmp_path / "cut")["schedule"]["phases"] == phases
    assert same_tensors(saved_tensors(tmp_path / "cut"), saved_tensors(tmp_path / "whole"))


def test_steps_done_again_after_a_crash_are_cut_as_before(store, tmp_path, script, monkeypatch):
    """The newest checkpoints are older than the choice: the tries before it are repeated too."""
    train(on_disk(tmp_path, "whole"), store, tmp_path / "whole", quiet=True)
    recipe = on_disk(tmp_path, "killed", keep_last=9)
    interrupt(monkeypatch, 26)
    train(recipe, store, tmp_path / "killed", quiet=True)
    for path in (tmp_path / "killed" / "checkpoints").glob("step-*"):
        if path != checkpoint_path(tmp_path / "killed" / "checkpoints", 7):
            path.rename(tmp_path / path.name)
    monkeypatch.setattr(adaptive, "search", None)  # nothing is tried anew
    assert train(recipe, store, tmp_path / "killed", quiet=True).status == "finished"
    assert same_tensors(saved_tensors(tmp_path / "killed"), saved_tensors(tmp_path / "whole"))


def test_a_run_interrupted_before_the_choice_searches_again(store, tmp_path, script, monkeypatch):
    interrupt(monkeypatch, 7)
    recipe = on_disk(tmp_path, "cut")
    assert train(recipe, store, tmp_path / "cut", quiet=True).status == "interrupted"
    assert train(recipe, store, tmp_path / "cut", quiet=True).status == "finished"
    phases = run_of(tmp_path / "cut")["schedule"]["phases"]
    assert [phase["step"] >= 7 + 16 for phase in phases if phase["chosen"]] == [True]


def test_other_conditions_make_the_choice_void(store, tmp_path, script, monkeypatch):
    interrupt(monkeypatch, 26)
    train(on_disk(tmp_path, "cut"), store, tmp_path / "cut", quiet=True)
    recipe = on_disk(tmp_path, "cut")
    in_memory = recipe.tables.model_copy(update={"tier": "memory", "directory": None})
    recipe = recipe.model_copy(update={"tables": in_memory})
    assert train(recipe, store, tmp_path / "cut", quiet=True).status == "finished"
    assert "phases" not in run_of(tmp_path / "cut")["schedule"]


def test_the_choice_is_made_again_when_the_steps_have_changed(store, tmp_path, script, monkeypatch):
    monkeypatch.setattr(auto_schedule, "FIRST_CHECK", 4)
    monkeypatch.setattr(adaptive.Trial, "drifted", lambda self, since, plain: True)
    train(on_disk(tmp_path, "run", epochs=60), store, tmp_path / "run", quiet=True)
    phases = [Phase(**phase) for phase in run_of(tmp_path / "run")["schedule"]["phases"]]
    assert len([phase for phase in phases if phase.chosen]) >= 2 and not lanes_left()


def test_a_share_of_lookups_that_grows_starts_another_search(store, tmp_path, monkeypatch):
    """Reads become slow in the middle of a run that had chosen the plain loop."""
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    monkeypatch.setattr(auto_schedule, "FIRST_CHECK", 4)
    monkeypatch.setattr(adaptive, "search", scripted((None, 2), choice=None))
    now, steps, read, loss = [0.0], [], Recommender.read, Recommender.loss
    clock = SimpleNamespace(perf_counter=lambda: now[0])  # time passes only as said here

    def take(self, plan):
        steps.append(plan)
        now[0] += 0.001 if len(steps) <= SLOW_FROM else 0.05
        return read(self, plan)

    def compute(*given):
        now[0] += 0.02
        return loss(*given)

    monkeypatch.setattr(auto_schedule, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(Recommender, "read", take)
    monkeypatch.setattr(Recommender, "loss", compute)
    recipe = on_disk(tmp_path, "run", epochs=24, evaluate_every=0, checkpoint_every=None)
    train(recipe, store, tmp_path / "run", quiet=True)
    phases = [Phase(**phase) for phase in run_of(tmp_path / "run")["schedule"]["phases"]]
    begun = [phase.step for phase in phases if phase.chosen]
    assert len(begun) == 2 and begun[1] > SLOW_FROM  # once at the start, once when shares drift


def test_one_rank_with_tables_in_memory_runs_the_plain_loop_alone(
    store, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(auto_schedule, "FEWEST_STEPS", 1)
    used = []
    real = PlainSteps.next
    monkeypatch.setattr(
        PlainSteps, "next", lambda self, step: used.append(step) or real(self, step)
    )
    recipe = small_recipe()
    assert recipe.train.schedule == "auto"
    result = train(recipe, store, tmp_path / "run")
    assert used == list(range(result.step)) and "schedule:" not in capsys.readouterr().err
    assert not (tmp_path / "run" / "trace.json").exists()


def test_a_short_run_says_that_nothing_is_tried(store, tmp_path, capsys):
    train(on_disk(tmp_path, "run"), store, tmp_path / "run")
    assert "schedule: the plain loop: 48 steps are too few" in capsys.readouterr().err


def recorder_of(recipe, store, ranks, step=0):
    recommender = Recommender.build(recipe, store)
    return SimpleNamespace(
        recommender=recommender, ranks=ranks, schedule={}, progress=SimpleNamespace(step=step)
    )


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({"tables": {"optimizer": "adamw"}}, Ranks(world=2), "adamw updates rows that no batch"),
        (
            {"tables": {"replicas": "averaged"}},
            Ranks(world=2, replicas=2),
            "averaged updates rows between steps",
        ),
        ({"loss": {"fetch": "segmented"}}, Ranks(world=2), None),
        ({}, Ranks(), ""),
        ({}, Ranks(world=2), None),
    ],
)
def test_what_cannot_be_scheduled_gives_the_reason(store, changes, ranks, said):
    recorder = recorder_of(small_recipe(**changes), store, ranks)
    candidates = [make_schedule("nested")]
    reason = plain_reason(recorder, candidates, 1000)
    assert said in reason if said else reason == said
    if ranks.world > 1:
        assert "no schedule" in (plain_reason(recorder, [], 1000) or "") or said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["dual_buffer", "nested"]),
        ({"loss": {"share": 2, "share_within": "batch"}}, ["dual_buffer"]),
        ({"tables": {"tier": "hashed", "admit_after": 2}}, ["frozen_window"]),
        ({"train": {"micro_batches": 1}}, ["dual_buffer"]),
        ({"tables": {"optimizer": "adamw"}}, []),
    ],
)
def test_only_schedules_that_can_run_are_tried(store, changes, expected):
    recommender = Recommender.build(small_recipe(**changes), store)
    assert recommender.device_transfer.device == HOST
    work = RecommenderWork(recommender, None, lambda: None, 1)
    assert [each.name for each in possible_schedules(recommender, work)] == expected


def test_auto_is_the_same_run_as_the_plain_loop():
    plain = small_recipe(train={"schedule": "synchronous"})
    assert trained_digest(small_recipe()) == trained_digest(plain)
