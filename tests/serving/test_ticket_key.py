"""The ticket key: made once, for its owner only, and refused where others could read it."""

import stat
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.ticket_key import KEY_FILE, read_ticket_key, state_directory


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path):
    place = tmp_path / "state" / "slipstream"
    key = read_ticket_key(place)
    assert len(bytes.fromhex(key)) == 32 and read_ticket_key(place) == key
    assert stat.S_IMODE((place / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in place.iterdir()] == [KEY_FILE]
    assert read_ticket_key(tmp_path / "other") != key


def test_a_key_that_others_can_read_or_that_is_damaged_is_refused(tmp_path: Path):
    read_ticket_key(tmp_path)
    path = tmp_path / KEY_FILE
    path.chmod(0o640)
    with pytest.raises(SlipstreamError, match="can be read by other users"):
        read_ticket_key(tmp_path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(SlipstreamError, match="is damaged"):
        read_ticket_key(tmp_path)
    with pytest.raises(SlipstreamError, match="choose another --state"):
        read_ticket_key(path / "below a file")


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert state_directory() == Path("/somewhere/slipstream")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_directory() == Path.home() / ".local/state/slipstream"
