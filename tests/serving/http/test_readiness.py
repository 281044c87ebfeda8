"""Whether a process is ready is asked over TCP and over a Unix socket; silence means no."""

import socket
import threading
from pathlib import Path

import pytest

from slipstream.serving.http import readiness
from slipstream.serving.http.process import listening_socket, unix_socket
from slipstream.serving.http.readiness import is_ready


def answer_once(listening: socket.socket, status: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        assert connection.recv(4096).startswith(b"GET /readyz ")
        connection.sendall(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize(("status", "ready"), [(b"200 OK", True), (b"503 Busy", False)])
def test_the_answer_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, status: bytes, ready: bool
):
    monkeypatch.setattr(readiness, "ANSWER_SECONDS", 60.0)
    path = str(tmp_path / "i-0.sock")
    with unix_socket(path) if place == "unix" else listening_socket("127.0.0.1", 0) as listening:
        url = f"unix:{path}"
        if place == "tcp":
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=answer_once, args=(listening, status))
        thread.start()
        assert is_ready(url) is ready
        thread.join(60)


def test_nobody_there_and_nonsense_are_not_ready(tmp_path: Path):
    assert not is_ready(f"unix:{tmp_path / 'nobody.sock'}")
    assert not is_ready("http://127.0.0.1:1")
    assert not is_ready("nowhere")
