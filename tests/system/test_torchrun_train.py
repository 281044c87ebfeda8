"""Every shipped recipe by every exact schedule, on one rank, two shards and two replicas.

`torchrun -m slipstream train` trains shrunk recipes, several runs a process. Of each recipe the run
of one schedule stops after some steps and is continued by the same command. All must end where the
plain loop ends: bit for bit where batches are not cut; where they are, bit for bit with the other
schedule that cuts alike, and within rounding of the plain loop.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from slipstream import api
from slipstream.config import load_recipe
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.pipeline import adaptive
from slipstream.training import auto_schedule, loop, run
from slipstream.training.recipe import Recipe
from slipstream.training.telemetry import read_metrics
from tests.support.ranks_fixtures import environment, run_ranks
from tests.support.shrunk_recipes import SHIPPED, shrunk, trained
from tests.support.training_fixtures import RICH, same_tensors, small_recipe, small_store

LONG = 500.0  # seconds; only ends a command that hangs
MESHES = {"1x1": 1, "1x2": 2, "2x1": 2}
CUT = "train.micro_batches=3"
SCHEDULES = {"dual_buffer": (), "frozen_window": (CUT,), "nested": (CUT,), "auto": ()}
STOP, END = 2, 4  # steps of a scheduled run before it is continued, and in all
WITHIN = 3  # shrunk recipes evaluate every so many steps; an epoch has five
OWN = "item.colours"  # a table with settings of its own
Case = tuple[int, list[str]]  # expected exit code, arguments of `slipstream`


def dense(name: str) -> bool:
    return load_recipe(Recipe, name).tables.optimizer == "adamw"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> SequenceStore:
    out = tmp_path_factory.mktemp("synthetic") / "store"
    return api.prepare("synthetic", out, synthetic=Synthetic(users=40, items=60, seed=3))


def arguments(name: str, store: SequenceStore, out: Path, *overrides: str) -> list[str]:
    """The words of a `slipstream train` command."""
    rows = out.with_name(f"{out.name}-rows")
    return ["train", name, *shrunk(name, store, rows), *overrides, "--out", str(out)]


def recipe_cases(
    name: str, store: SequenceStore, place: Path, mesh: str, schedules: Sequence[str]
) -> list[Case]:
    """A recipe by the plain loop and by schedules; what cannot be scheduled is refused."""
    place, whole = place / name, f"max_steps={END}"
    rowwise = ("tables.optimizer=rowwise_adam",) if dense(name) else ()
    common = (f"mesh={mesh}", *rowwise)
    plain = arguments(name, store, place / "plain", whole, "schedule=synchronous", *common)
    cases: list[Case] = [(0, plain)]
    for schedule in schedules:
        chosen = (f"schedule={schedule}", *SCHEDULES[schedule], *common)
        stopped = schedule == schedules[SHIPPED.index(name) % len(schedules)]
        for steps in (f"max_steps={STOP}", whole) if stopped else (whole,):
            cases.append((0, arguments(name, store, place / schedule, steps, *chosen)))
    if rowwise:
        refused = (f"mesh={mesh}", "max_steps=1", "schedule=nested")
        cases.append((1, arguments(name, store, place / "refused", *refused)))
    return cases


def run_cases(cases: list[Case], place: Path, ranks: int) -> str:
    """Run commands one after the other in one process a rank; return what was printed."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "cases.json").write_text(json.dumps(cases))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    started = [sys.executable] if ranks == 1 else [*launcher, "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*started, "-m", "tests.support.shrunk_recipes", str(place / "cases.json")],
        cwd=Path(__file__).parents[2],
        env=environment(PYTHONPATH=os.environ.get("PYTHONPATH", "")),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def figures(run_dir: Path) -> list[dict[str, float]]:
    """The figures of a finished run's evaluations: within an epoch, and after its last step."""
    recorded = json.loads((run_dir / "run.json").read_text())
    assert (recorded["status"], recorded["step"]) == ("finished", END)
    evaluations = [each for each in read_metrics(run_dir / "metrics.jsonl") if "validation" in each]
    found = [each["validation"] for each in evaluations if each["step"] in (WITHIN, END)]
    assert len(found) == 2
    return found


def check_recipe(place: Path, schedules: Sequence[str]) -> None:
    """Hold every schedule's run against the plain loop's."""
    plain, expected, cut = trained(place / "plain"), figures(place / "plain"), []
    for name in schedules:
        found, where = trained(place / name), f"{place.name} by {name}"
        if not SCHEDULES[name]:
            assert same_tensors(found, plain) and figures(place / name) == expected, where
            continue
        assert plain.keys() == found.keys()
        for key, value in found.items():
            assert torch.allclose(value, plain[key], atol=1e-5, rtol=1e-4), f"{where}: {key}"
        cut.append(found)
    assert all(same_tensors(one, cut[0]) for one in cut), place.name


def check_matrix(
    names: Sequence[str], mesh: str, schedules: Sequence[str], store: SequenceStore, place: Path
) -> None:
    cases = [case for name in names for case in recipe_cases(name, store, place, mesh, schedules)]
    said = run_cases(cases, place, MESHES[mesh])
    for name in names:
        check_recipe(place / name, schedules)
    refused = MESHES[mesh] * sum(map(dense, names))  # every rank says why it ends
    assert said.count("updates rows that no batch touched; use") == refused


@pytest.mark.parametrize(
    ("name", "mesh", "schedules"),
    [
        ("kuairand-pure-ranking", "1x2", ("dual_buffer", "nested")),
        pytest.param("kuairand-27k-fuxi", "2x1", ("nested",), marks=pytest.mark.slow),
    ],
)
def test_a_recipe_trains_alike_by_schedules(name, mesh, schedules, store, tmp_path):
    check_matrix((name,), mesh, schedules, store, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_recipe_trains_alike_by_every_schedule(mesh, store, tmp_path):
    check_matrix(SHIPPED, mesh, tuple(SCHEDULES), store, tmp_path)


def test_tables_of_different_widths_optimizers_and_places_train_alike(tmp_path):
    """Two shards by a schedule that cuts batches, against one rank by the plain loop."""
    store = small_store(tmp_path / "store", rich=True)
    tables = {"optimizer": "rowwise_adagrad", "tier": "disk", "cache_bytes": 1 << 16}
    own = {"dim": 16, "optimizer": "rowwise_adam", "tier": "memory", "lr": 0.002}
    recipes = {
        name: small_recipe(
            data=str(store.directory),
            tables={**tables, "directory": f"{tmp_path / name}-rows", "by_name": {OWN: own}},
            train={"schedule": schedule, "micro_batches": 2, "max_steps": END},
            **RICH,
        )
        for name, schedule in (("plain", "synchronous"), ("two", "nested"))
    }
    run.train(recipes["plain"], store, tmp_path / "plain", quiet=True)
    (tmp_path / "mixed.yaml").write_text(json.dumps(recipes["two"].model_dump(mode="json")))
    words = ["train", str(tmp_path / "mixed.yaml"), "--out", str(tmp_path / "two")]
    run_cases([(0, words)], tmp_path / "cases", 2)
    plain, two = (run.open_run(tmp_path / name)[2] for name in recipes)
    assert {table.dim for table in two.tables.tables.values()} == {8, 16}
    for name in plain.tables.tables:
        found, expected = two.tables.all_rows(name), plain.tables.all_rows(name)
        assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4), name
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(two.model.state_dict()[name], value, atol=1e-5, rtol=1e-4), name


def test_the_command_as_it_is_typed(store, tmp_path):
    """`torchrun -m slipstream train` with a shipped recipe that names its schedule."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = arguments("kuairand-1k-hstu", store, tmp_path / "run", f"max_steps={END}")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "slipstream", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert figures(tmp_path / "run") and (tmp_path / "run" / "trace.json").exists()


def test_few_recipes_cannot_be_scheduled():
    """They are listed in the guide to schedules, each with the key that lets it be scheduled."""
    guide = (Path(__file__).parents[2] / "docs/guides/schedules.md").read_text()
    few = [name for name in SHIPPED if dense(name)]
    assert few == ["ml-1m-hstu-full", "ml-1m-hstu-large"]
    assert all(f"`{name}`" in guide for name in few)


def test_two_ranks_search_and_choose_alike(tmp_path):
    """Every phase begins at the same step on both ranks, and the weights stay the plain loop's."""
    small_store(tmp_path / "store")
    answers = run_ranks(2, f"{__name__}:search_together", tmp_path / "ranks", place=str(tmp_path))
    assert answers[0] == answers[1] and answers[0]["difference"] < 1e-9
    assert [phase["schedule"] for phase in answers[0]["phases"][:3]] == [
        "synchronous",
        "dual_buffer",
        "nested",
    ]
    assert (
        answers[0]["phases"][-1]["chosen"]
        and answers[0]["statuses"] == ["interrupted"] + ["finished"] * 3
    )


def search_together(rank, world, place):
    store, found, statuses = SequenceStore.open(Path(place) / "store"), {}, []
    auto_schedule.FEWEST_STEPS, adaptive.WORTH_TRYING = 1, 0.0
    auto_schedule.FEWEST_TO_CUT = 1
    real, stops = loop.run_loop, iter((30,))

    def stopped_once(recipe, steps, loader, progress, hooks, ranks):
        at, on_step = next(stops, None), hooks.on_step
        hooks.on_step = lambda progress, batch: (
            on_step(progress, batch),
            hooks.stop.set() if progress.step == at and ranks.rank == 1 else None,
        )
        return real(recipe, steps, loader, progress, hooks, ranks)

    run.run_loop = stopped_once
    for name, schedule in (("auto", "auto"), ("auto", "auto"), ("plain", "synchronous")):
        recipe = small_recipe(
            optimizer={"clip_norm": 1.0},
            train={"epochs": 1000, "max_steps": 110, "schedule": schedule, "checkpoint_every": 40},
        )
        out = Path(place) / name
        statuses.append(run.train(recipe, store, out, quiet=True, dtype=torch.float64).status)
        found[name] = trained(out)
    recorded = json.loads((Path(place) / "auto" / "run.json").read_text())["schedule"]["phases"]
    statuses.append(run.train(recipe, store, out, quiet=True, dtype=torch.float64).status)
    difference = max(
        float((value.double() - found["plain"][name].double()).abs().max())
        for name, value in found["auto"].items()
    )
    return {"phases": recorded, "difference": difference, "statuses": statuses}
