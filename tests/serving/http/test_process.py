"""The process around an app: its settings and its socket."""

import io
import socket
from pathlib import Path

import msgspec
import pytest

from slipstream.serving.http.process import (
    INSTANCE_KEY_VARIABLE,
    KEYS_VARIABLE,
    ProcessSettings,
    instance_keys,
    keys_from_environment,
    listening_socket,
    read_settings,
    reserve_port,
    unix_socket,
)

LONG = 60.0  # seconds; only ends a test that hangs


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEYS_VARIABLE, "one key of some length\nanother of length role=admin")
    keys = keys_from_environment()
    found = keys.accept(b"another of length")
    assert len(keys) == 2 and found is not None and found[1].role == "admin"
    assert not instance_keys()
    monkeypatch.setenv(INSTANCE_KEY_VARIABLE, "a secret of routers")
    found = instance_keys().accept(b"a secret of routers")
    assert found is not None and found[1].may("admin")


def test_port_0_takes_a_free_port_and_a_taken_one_is_an_error():
    with listening_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), pytest.raises(OSError):
            listening_socket("127.0.0.1", port)


def test_settings_come_from_stdin_or_the_argument(monkeypatch: pytest.MonkeyPatch):
    settings = ProcessSettings(socket_path="here", linger=0.5)
    text = msgspec.json.encode(settings).decode()
    assert read_settings(text, ProcessSettings) == settings
    monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))
    assert read_settings("-", ProcessSettings) == settings
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        read_settings("-", ProcessSettings)
    assert ended.value.code == 0


def test_a_unix_socket_is_private_and_takes_the_place_of_one_left_behind(tmp_path: Path):
    path = tmp_path / "i-0.sock"
    unix_socket(str(path)).close()
    with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(path))
    with unix_socket(str(path)), socket.socket(socket.AF_UNIX) as late:
        late.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
        assert [found.name for found in tmp_path.iterdir()] == ["i-0.sock"]


def test_a_reserved_port_refuses_connections_until_a_process_of_its_user_listens():
    with reserve_port("127.0.0.1", 0) as reserved:
        address = reserved.getsockname()
        for _ in range(2):
            with socket.socket() as early:
                assert early.connect_ex(address) != 0
            with reserve_port(*address) as listening:
                listening.listen()
                socket.create_connection(address, LONG).close()
                listening.accept()[0].close()
        with pytest.raises(OSError):
            listening_socket(*address)  # as a process of somebody else would
