"""Files and directories are whole or absent, and what was there before stays until then."""

import errno
import os
import stat

import pytest

from slipstream.errors import SlipstreamError
from slipstream.files import (
    DESCRIPTIONS,
    atomic_directory,
    atomic_file,
    check_output,
    fsync_path,
    link_or_copy,
    read_json,
    write_json,
)


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


def described(directory, kind):
    """A directory that a command wrote, with something else beside its description."""
    directory.mkdir(parents=True)
    (directory / DESCRIPTIONS[kind]).write_text("{}")
    return directory


def test_an_absent_or_empty_directory_may_be_written(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        check_output(tmp_path / name, "bundle", inputs=[tmp_path / "run"])


@pytest.mark.parametrize("force", [False, True])
def test_files_of_others_are_never_replaced(tmp_path, force):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SlipstreamError, match="is not empty and was not written by this command"):
        check_output(tmp_path, "store", force=force)


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_the_same_kind_is_replaced_by_force_and_another_kind_never(tmp_path, kind):
    there = described(tmp_path / "there", kind)
    with pytest.raises(SlipstreamError, match="--force to replace this"):
        check_output(there, kind)
    check_output(there, kind, force=True)
    for other in set(DESCRIPTIONS) - {kind}:
        with pytest.raises(SlipstreamError, match=f"holds a {kind}, which a {other} must not"):
            check_output(there, other, force=True)


@pytest.mark.parametrize("place", ["run", ".", "run/bundle", "link"])
def test_an_input_is_never_overwritten_nor_written_into(tmp_path, place):
    run = described(tmp_path / "run", "run")
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(SlipstreamError, match="its own input"):
        check_output(tmp_path / place, "run", force=True, inputs=[run])


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(SlipstreamError, match="is a file, but a store is a directory"):
        check_output(tmp_path / "out", "store", force=True)


def test_a_file_gets_a_second_name_or_is_copied(tmp_path, monkeypatch):
    source = tmp_path / "a"
    source.write_text("rows")
    link_or_copy(source, tmp_path / "b")
    assert source.samefile(tmp_path / "b")

    def refuse(*given):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(source, tmp_path / "c")
    assert (tmp_path / "c").read_text() == "rows" and not source.samefile(tmp_path / "c")
