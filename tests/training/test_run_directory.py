"""A run's directory: nothing of others is written over, and its data are found again."""

import json
import os
import shutil

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.training import run as run_module
from slipstream.training.run import open_run, train
from slipstream.training.run_directory import find_store, recorded_threads, sole_user, sweep
from tests.support.training_fixtures import same_tensors, saved_tensors, small_recipe, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


def contents(directory):
    """Every file below a directory, with its bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_another_recipe_is_named_with_what_differs(store, tmp_path):
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    with pytest.raises(
        SlipstreamError, match=r"another recipe \('small'\), with seed 3 instead of"
    ):
        train(small_recipe(seed=4), store, tmp_path / "run", quiet=True)


def test_force_replaces_a_run_of_another_recipe(store, tmp_path):
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    train(small_recipe(seed=4), store, tmp_path / "run", quiet=True, force=True)
    train(small_recipe(seed=4), store, tmp_path / "fresh", quiet=True)
    assert same_tensors(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "fresh"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "run"]


def test_force_resumes_a_run_of_the_same_recipe(store, tmp_path):
    recipe = small_recipe(train={"max_steps": 2, "epochs": 9})
    train(recipe, store, tmp_path / "run", quiet=True)
    longer = small_recipe(train={"max_steps": 4, "epochs": 9})
    assert train(longer, store, tmp_path / "run", quiet=True, force=True).step == 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]


def test_a_run_with_a_foreign_file_is_not_replaced_even_by_force(store, tmp_path):
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "run")
    with pytest.raises(SlipstreamError, match=r"holds 'notes\.txt', which no run writes"):
        train(small_recipe(seed=4), store, tmp_path / "run", quiet=True, force=True)
    assert contents(tmp_path / "run") == before


def test_a_replaced_run_comes_back_when_the_new_one_does_not_start(store, tmp_path):
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    before = contents(tmp_path / "run")
    with pytest.raises(SlipstreamError, match="no item feature 'gnere'"):
        train(
            small_recipe(item_features=["gnere"]), store, tmp_path / "run", quiet=True, force=True
        )
    assert contents(tmp_path / "run") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_somebody_trains_is_not_replaced(store, tmp_path):
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    with (
        sole_user(tmp_path / "run"),
        pytest.raises(SlipstreamError, match="another process works"),
    ):
        train(small_recipe(seed=4), store, tmp_path / "run", quiet=True, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["foreign", "store", "bundle", "hidden", "file"])
def test_what_is_no_run_is_left_alone(store, tmp_path, kind, force):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("a file")
    else:
        out.mkdir()
        name = {"store": "store.json", "bundle": "bundle.json", "hidden": ".git"}.get(kind, "x.txt")
        (out / name).write_text("{}")
    with pytest.raises(SlipstreamError, match="give another --out"):
        train(small_recipe(), store, out, quiet=True, force=force)
    assert out.read_text() == "a file" if kind == "file" else len(list(out.iterdir())) == 1


@pytest.mark.parametrize("place", ["", "inside", ".."])
def test_a_run_is_not_written_into_or_around_its_own_data(tmp_path, place):
    own = small_store(tmp_path / "data" / "store")
    before = contents(tmp_path / "data")
    with pytest.raises(SlipstreamError, match="own input"):
        train(small_recipe(), own, own.directory / place, quiet=True, force=True)
    assert contents(tmp_path / "data") == before


def test_a_session_that_failed_at_its_start_leaves_a_directory_that_can_be_used(store, tmp_path):
    with pytest.raises(SlipstreamError, match="no item feature"):
        train(small_recipe(item_features=["gnere"]), store, tmp_path / "run", quiet=True)
    assert train(small_recipe(), store, tmp_path / "run", quiet=True).status == "finished"


def test_sweeping_removes_only_what_a_run_was_writing(tmp_path):
    (tmp_path / "checkpoints" / ".step-00000004.abc").mkdir(parents=True)
    for name in (".run.json.abc", ".recipe.yaml.x1", ".lock", ".gitignore"):
        (tmp_path / name).touch()
    (tmp_path / ".git").mkdir()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".lock", ".gitignore", ".git", "checkpoints")
    }
    assert not list((tmp_path / "checkpoints").iterdir())


def test_resuming_says_from_which_step(store, tmp_path, capsys):
    recipes = [small_recipe(train={"max_steps": steps, "epochs": 9}) for steps in (5, 7)]
    train(recipes[0], store, tmp_path / "run")
    assert "resuming" not in capsys.readouterr().err
    epoch = json.loads((tmp_path / "run" / "run.json").read_text())["epoch"] + 1
    train(recipes[1], store, tmp_path / "run")
    assert f"resuming {tmp_path / 'run'} from step 5 (epoch {epoch})" in capsys.readouterr().err


def test_a_resumed_run_takes_the_threads_it_was_started_with(store, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "choose_threads", lambda most: (2, "2 of 4 threads: busy"))
    recipes = [
        small_recipe(train={"threads": None, "max_steps": n, "epochs": 9}) for n in (2, 4, 6)
    ]
    train(recipes[0], store, tmp_path / "run", quiet=True)
    assert recorded_threads(tmp_path / "run", ranks=1) == 2
    assert recorded_threads(tmp_path / "run", ranks=2) is None
    monkeypatch.setattr(run_module, "choose_threads", lambda most: (1, ""))
    train(recipes[1], store, tmp_path / "run", quiet=True)
    assert recorded_threads(tmp_path / "run", ranks=1) == 2
    assert torch.get_num_threads() == 1  # as before the training


def test_why_threads_were_chosen_is_said_once(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "choose_threads", lambda most: (1, "1 of 2 threads: busy"))
    train(small_recipe(train={"threads": None, "max_steps": 1}), store, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("1 of 2 threads: busy; train.threads chooses another number") == 1


def test_data_are_found_from_another_folder_and_after_both_were_moved(tmp_path, monkeypatch):
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    small_store(tmp_path / "place" / "data")
    own = find_relative("data")
    train(small_recipe(train={"max_steps": 1}), own, "runs/x", quiet=True)
    monkeypatch.chdir(tmp_path)
    assert open_run("place/runs/x")[1].digest == own.digest
    os.rename("place", "moved")
    assert open_run("moved/runs/x")[1].directory.resolve() == tmp_path / "moved" / "data"
    os.rename("moved/data", "elsewhere")
    with pytest.raises(SlipstreamError, match=r"are not in .*/place/data any more; .*--data DIR"):
        open_run("moved/runs/x")
    assert open_run("moved/runs/x", "elsewhere")[1].digest == own.digest
    other = small_store(tmp_path / "other", seed=5)
    for given in (other, other.directory):
        with pytest.raises(SlipstreamError, match="trained on other data than"):
            find_store("moved/runs/x", given)


def test_a_run_of_an_earlier_version_keeps_its_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_store(tmp_path / "data")
    train(small_recipe(train={"max_steps": 1}), find_relative("data"), "run", quiet=True)
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    note["store"] = {"directory": "data", "digest": note["store"]["digest"]}
    del note["machine"]["ranks"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(note))
    assert open_run("run")[1].digest == note["store"]["digest"]
    assert recorded_threads(tmp_path / "run", ranks=1) == 1
    shutil.rmtree("data")
    with pytest.raises(SlipstreamError, match="--data DIR"):
        open_run("run")


def find_relative(place):
    """Open a store by a path relative to this folder."""
    from slipstream.data.store import SequenceStore

    return SequenceStore.open(place)
