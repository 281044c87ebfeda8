"""A deployment's directory in shared memory: private, taken over after a kill, else removed."""

import os
import time
from pathlib import Path

from slipstream.serving.shelf_directory import (
    MARK,
    ORPHAN_SECONDS,
    ShelfDirectory,
    find_shared_memory,
)
from tests.support.processes import run_python


def leave_behind(place: Path, state: Path) -> Path:
    """What a supervisor that was killed leaves: a directory with a host tier."""
    code = f"""
import os, pathlib
from slipstream.serving.shelf_directory import ShelfDirectory
directory = ShelfDirectory(pathlib.Path({str(state)!r}), pathlib.Path({str(place)!r}))
(directory.path / "i-0.shelf").write_text("prefixes")
print(directory.path, flush=True)
os._exit(0)
"""
    return Path(run_python(code))


def test_a_directory_is_private_and_gone_at_the_end(tmp_path: Path):
    directory = ShelfDirectory(tmp_path / "state", tmp_path)
    assert directory.path.stat().st_mode & 0o777 == 0o700 and not directory.adopted
    directory.remove()
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_supervisor_is_taken_over_by_the_next_one(tmp_path: Path):
    state = tmp_path / "state"
    left = leave_behind(tmp_path, state)
    again = ShelfDirectory(state, tmp_path)
    assert again.adopted and again.path == left
    assert (again.path / "i-0.shelf").read_text() == "prefixes"


def test_a_directory_in_use_is_left_alone(tmp_path: Path):
    state = tmp_path / "state"
    mine = ShelfDirectory(state, tmp_path)
    second = ShelfDirectory(state, tmp_path)
    assert mine.path.exists() and second.path != mine.path
    nameless = ShelfDirectory(None, tmp_path)
    assert not nameless.adopted and mine.path.exists()


def test_the_directory_of_another_deployment_is_removed_when_nobody_came_back(tmp_path: Path):
    state = tmp_path / "other state"
    left = leave_behind(tmp_path, state)
    ShelfDirectory(tmp_path / "state", tmp_path).remove()
    assert (left / "i-0.shelf").exists() and (left / MARK).exists()
    own = ShelfDirectory(state, tmp_path)
    assert own.path == left and not (left / MARK).exists(), "it came back in time"
    own.remove()
    left = leave_behind(tmp_path, state)
    ShelfDirectory(tmp_path / "state", tmp_path).remove()
    long_ago = time.time() - 2 * ORPHAN_SECONDS
    os.utime(left / MARK, (long_ago, long_ago))
    ShelfDirectory(tmp_path / "state", tmp_path).remove()
    assert not left.exists()


def test_what_is_not_ours_is_never_touched(tmp_path: Path):
    start = f"slipstream-{os.getuid()}-"
    readable, target = tmp_path / f"{start}readable", tmp_path / "target"
    readable.mkdir(mode=0o755)
    target.mkdir()
    (tmp_path / f"{start}link").symlink_to(target)
    ShelfDirectory(tmp_path / "state", tmp_path)
    assert readable.exists() and target.exists()


def test_shared_memory_is_where_it_can_be_written():
    assert os.access(find_shared_memory(), os.W_OK)
