"""No command that writes a directory touches what it did not make, nor its own input."""

import json
import shutil

import pytest

from slipstream import api
from slipstream.cli.app import run_command
from slipstream.files import DESCRIPTIONS
from tests.cli.test_demo import prepare_synthetic_only
from tests.support.tiny_runs import TINY, prepare_and_train


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A log, its store, a run, a bundle and a search."""
    place = prepare_and_train(tmp_path_factory.mktemp("made"))
    bundle = ["export", str(place / "run"), "--out", str(place / "bundle")]
    assert run_command(bundle) == 0
    search = ["tune", *command("train", place, place / "tune")[1:], "evaluate_every=1"]
    assert run_command([*search, "--over", "seed=choice(1,2)", "--trials", "1"]) == 0
    return place


@pytest.fixture
def here(made, tmp_path):
    """A copy of them that a test may spoil."""
    return shutil.copytree(made, tmp_path / "here")


def contents(directory):
    """Every file below a directory, with its bytes; a lock is no content."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def command(name, place, out):
    """The words of a command that writes a directory `out`, with the data of `place`."""
    return {
        "prepare": ["data", "prepare", str(place / "log.csv"), "--out", str(out)],
        "train": ["train", "ml-1m-hstu", f"data={place / 'store'}", *TINY, "--out", str(out)],
        "export": ["export", str(place / "run"), "--data", str(place / "store"), "--out", str(out)],
        "demo": ["demo", "--out", str(out), *TINY, "max_steps=1"],
    }[name]


WRITERS = {"prepare": "store", "train": "run", "export": "bundle", "demo": None}


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize("name", ["prepare", "train", "export"])
def test_a_directory_of_others_is_left_alone(name, force, here, capsys):
    out = here / "notempty"
    out.mkdir()
    (out / "thesis.txt").write_text("ten years of work")
    before = contents(here)
    assert run_command([*command(name, here, out), *(["--force"] if force else [])]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert contents(here) == before


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in WRITERS for kind in DESCRIPTIONS if kind != WRITERS[name]],
)
def test_another_kind_is_never_replaced(name, kind, force, here, monkeypatch, capsys):
    monkeypatch.setattr(api, "prepare", prepare_synthetic_only)
    before = contents(here)
    out = shutil.copytree(here / kind, here / "copy")
    assert run_command([*command(name, here, out), *(["--force"] if force else [])]) == 1
    assert "error: " in capsys.readouterr().err
    shutil.rmtree(here / "copy")
    assert contents(here) == before


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("train", "store"),
        ("train", "store/run"),
        ("train", "."),
        ("export", "run"),
        ("export", "store"),
        ("export", "run/bundle"),
        ("export", "."),
    ],
)
def test_no_command_writes_into_or_around_its_own_input(name, out, here, capsys):
    before = contents(here)
    assert run_command([*command(name, here, here / out), "--force"]) == 1
    assert "error: " in capsys.readouterr().err
    assert contents(here) == before


@pytest.mark.parametrize("name", ["prepare", "export"])
def test_its_own_kind_is_replaced_by_force_only(name, here, capsys):
    out = shutil.copytree(here / WRITERS[name], here / "copy")
    before = contents(out)
    assert run_command(command(name, here, out)) == 1
    assert "--force" in capsys.readouterr().err
    assert contents(out) == before
    assert run_command([*command(name, here, out), "--force"]) == 0


def test_training_resumes_its_own_run_and_replaces_another_by_force_only(here, capsys):
    run = here / "run"
    assert run_command(command("train", here, run)) == 0  # the same: nothing left to do
    before = contents(run)
    other = [*command("train", here, run), "seed=9"]
    assert run_command(other) == 1
    assert "seed 1 instead of 9; choose another directory, or give --force" in (
        capsys.readouterr().err
    )
    assert contents(run) == before
    assert run_command([*other, "--force"]) == 0
    assert json.loads((run / "run.json").read_text())["recipe"]["seed"] == 9


@pytest.mark.system
def test_the_demo_leaves_files_of_others_alone_and_can_be_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api, "prepare", prepare_synthetic_only)
    out = tmp_path / "demo"
    (out / "bundle").mkdir(parents=True)
    (out / "bundle" / "mine.txt").write_text("mine")
    assert run_command(command("demo", tmp_path, out)) == 1
    assert "bundle is not empty and was not written by this command" in capsys.readouterr().err
    assert contents(tmp_path) == {"demo/bundle/mine.txt": b"mine"}
    shutil.rmtree(out)
    assert run_command(command("demo", tmp_path, out)) == 0
    assert run_command(command("demo", tmp_path, out)) == 0
    other = [*command("demo", tmp_path, out), "seed=5"]
    assert run_command(other) == 1
    assert run_command([*other, "--force"]) == 0


def test_export_finds_data_that_were_moved_by_the_option(here, capsys):
    (here / "store").rename(here / "elsewhere")
    words = ["export", str(here / "run"), "--out", str(here / "new")]
    shutil.rmtree(here.parent / "made", ignore_errors=True)
    note = json.loads((here / "run" / "run.json").read_text())
    note["store"] |= {"directory": str(here / "store")}
    (here / "run" / "run.json").write_text(json.dumps(note))
    assert run_command(words) == 1
    assert "--data DIR" in capsys.readouterr().err
    assert run_command([*words, "--data", str(here / "elsewhere"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bundle"] == str(here / "new") and len(told["version"]) > 8


def test_training_tells_its_end_as_json(here, capsys):
    words = command("train", here, here / "new")
    assert run_command([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["run"]) == ("finished", str(here / "new"))
    assert told["step"] > 0 and told["metrics"]["HR@10"] >= 0
