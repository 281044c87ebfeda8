"""Files and directories appear whole or not at all."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, atomic_file, read_json, write_json


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    target = tmp_path / "figures.json"
    write_json(target, {"step": 1})
    with pytest.raises(ZeroDivisionError), atomic_file(target) as path:
        path.write_text("half")
        raise ZeroDivisionError
    assert read_json(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_a_directory_replaces_the_old_one_as_a_whole(tmp_path):
    target = tmp_path / "store"
    for content in ("old", "new"):
        with atomic_directory(target) as path:
            (path / content).write_text(content)
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_directory_that_fails_half_way_leaves_the_old_one(tmp_path):
    target = tmp_path / "store"
    with atomic_directory(target) as path:
        (path / "old").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_directory(target) as path:
        (path / "new").write_text("new")
        raise ZeroDivisionError
    assert [path.name for path in target.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "does not exist"), ("{", "is not readable JSON")]
)
def test_missing_and_damaged_json_are_named(tmp_path, content, sentence):
    target = tmp_path / "run.json"
    if content is not None:
        target.write_text(content)
    with pytest.raises(SlipstreamError, match=f"run.json {sentence}"):
        read_json(target)
