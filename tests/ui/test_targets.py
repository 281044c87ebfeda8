"""What is given to `slipstream ui` is told apart: addresses, bundles, runs, directories."""

from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.ui.targets import MOST_MODELS, read_targets, recipe_name


def make(place: Path, file: str, text: str = "{}") -> Path:
    place.mkdir(parents=True)
    (place / file).write_text(text)
    return place


def test_each_kind_is_recognised(tmp_path: Path):
    bundle = make(tmp_path / "b" / "one", "bundle.json", '{"recipe": {"name": "films"}}')
    run = make(tmp_path / "runs" / "deep" / "r", "run.json")
    found = read_targets(["http://127.0.0.1:8000/", str(bundle), str(run.parent.parent)])
    assert found.servers == {"127.0.0.1:8000": "http://127.0.0.1:8000"}
    assert found.bundles == {"one": bundle} and found.runs == tmp_path / "runs"
    assert found.single_run is None and recipe_name(bundle) == "films"
    alone = read_targets([str(run)])
    assert (alone.single_run, alone.runs, alone.bundles) == (run, run, {})
    assert read_targets([str(run), str(bundle)]).single_run is None


def test_a_directory_gives_its_runs_and_newest_bundles(tmp_path: Path):
    make(tmp_path / "run", "run.json")
    for number in range(MOST_MODELS + 2):
        make(tmp_path / f"bundle-{number}", "bundle.json")
    found = read_targets([str(tmp_path)])
    assert found.runs == tmp_path and len(found.bundles) == MOST_MODELS


def test_equal_names_are_kept_apart(tmp_path: Path):
    one = make(tmp_path / "a" / "bundle", "bundle.json")
    other = make(tmp_path / "b" / "bundle", "bundle.json")
    assert read_targets([str(one), str(other)]).bundles == {"bundle": one, "bundle (2)": other}


@pytest.mark.parametrize("kind", ["store.json", None])
def test_what_cannot_be_shown_is_refused(tmp_path: Path, kind: str | None):
    place = make(tmp_path / "x", kind) if kind else tmp_path / "absent"
    with pytest.raises(SlipstreamError, match="is no bundle, no run"):
        read_targets([str(place)])


def test_an_empty_directory_and_two_directories_of_runs_are_refused(tmp_path: Path):
    with pytest.raises(SlipstreamError, match="no run and no bundle"):
        read_targets([str(tmp_path)])
    one, other = make(tmp_path / "a" / "r", "run.json"), make(tmp_path / "b" / "r", "run.json")
    with pytest.raises(SlipstreamError, match="one directory"):
        read_targets([str(one.parent), str(other.parent)])
