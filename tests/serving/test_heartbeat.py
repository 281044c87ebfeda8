"""A heartbeat: a moment that one process writes and another reads."""

import time
from pathlib import Path

import pytest

from slipstream.serving.heartbeat import Heartbeat
from tests.support.processes import run_python


def test_a_beat_of_another_process_is_read_by_the_same_clock(tmp_path: Path):
    path = tmp_path / "beat"
    mine = Heartbeat(path)
    assert not mine.begun and mine.silent_since() is None
    before = time.monotonic()
    code = f"from slipstream.serving.heartbeat import Heartbeat; Heartbeat({str(path)!r}).beat()"
    run_python(code)
    assert mine.begun and before < mine.silent_since() <= time.monotonic()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_ends_is_not_silent_and_a_new_one_has_not_begun(tmp_path: Path):
    beat = Heartbeat(tmp_path / "beat")
    beat.beat()
    beat.end()
    assert beat.begun and beat.silent_since() is None
    beat.reset()
    assert not beat.begun


def test_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "beat").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Heartbeat(tmp_path / "beat")
    assert not (tmp_path / "elsewhere").exists()
