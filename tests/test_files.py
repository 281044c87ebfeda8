"""Files and directories are whole or absent, and what was there before stays until then."""

import errno
import os
import stat

import pytest

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, atomic_file, fsync_path, read_json, write_json


def test_a_file_appears_whole_with_readable_rights_and_nothing_else(tmp_path):
    target = tmp_path / "below" / "file.txt"
    with atomic_file(target) as path:
        path.write_text("new")
        assert not target.exists() and path.parent == target.parent
    assert target.read_text() == "new" and os.listdir(target.parent) == ["file.txt"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path, error):
    target = tmp_path / "file.txt"
    target.write_text("old")
    with pytest.raises(error), atomic_file(target) as path:
        path.write_text("half of the ne")
        raise error
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]


def test_a_directory_replaces_another_only_when_it_is_complete(tmp_path):
    target = tmp_path / "store"
    with atomic_directory(target) as directory:
        (directory / "one").write_text("1")
    with pytest.raises(RuntimeError), atomic_directory(target) as directory:
        (directory / "two").write_text("2")
        raise RuntimeError
    assert os.listdir(target) == ["one"]
    with atomic_directory(target) as directory:
        (directory / "two").write_text("2")
        assert os.listdir(target) == ["one"]
    assert os.listdir(target) == ["two"] and os.listdir(tmp_path) == ["store"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


@pytest.mark.parametrize("atomic", [atomic_file, atomic_directory])
def test_a_full_disk_is_one_sentence_that_names_the_target(tmp_path, atomic):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    words = f"could not write {tmp_path / 'x'}: No space left on device; nothing was left behind"
    with pytest.raises(SlipstreamError, match=words), atomic(tmp_path / "x"):
        raise full
    assert os.listdir(tmp_path) == []


def test_json_comes_back_and_bad_json_is_named(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": [1, "ü"]})
    assert read_json(path) == {"a": [1, "ü"]}
    path.write_text("{")
    with pytest.raises(SlipstreamError, match=r"value\.json is not readable JSON"):
        read_json(path)
    with pytest.raises(SlipstreamError, match=r"absent\.json does not exist"):
        read_json(tmp_path / "absent.json")


def test_files_and_directories_can_be_flushed(tmp_path):
    (tmp_path / "file").write_text("x")
    fsync_path(tmp_path / "file")
    fsync_path(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_path(tmp_path / "absent")
