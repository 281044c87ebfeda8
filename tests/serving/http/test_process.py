"""The process around an app: its socket, its signals, and an end that finishes every request."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from slipstream.serving.http.process import keys_from_environment, listening_socket

LONG = 60.0  # seconds; only ends a test that hangs
APP = """
import asyncio, sys
from slipstream.serving.http.process import ProcessSettings, run_app

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        print("listening", flush=True)
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    print("asked", flush=True)
    while not draining:
        await asyncio.sleep(0.01)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"finished"})

draining = []

def start_draining():
    draining.append(True)
    print("draining", flush=True)

settings = ProcessSettings(socket_fd=int(sys.argv[1]), linger=0.1, watch_parent=True)
run_app(app, settings, start_draining)
"""


def test_keys_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_KEYS", "one,,two")
    assert keys_from_environment("SOME_KEYS") == ("one", "two")
    assert keys_from_environment("NO_SUCH_VARIABLE") == ()


def test_port_0_takes_a_free_port_and_a_taken_one_is_an_error():
    with listening_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), pytest.raises(OSError):
            listening_socket("127.0.0.1", port)


@pytest.mark.system
@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "the supervisor's death"])
def test_the_request_under_way_is_finished_before_the_end(way: str):
    with listening_socket("127.0.0.1", 0) as bound:
        process = subprocess.Popen(
            [sys.executable, "-c", APP, str(bound.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(bound.fileno(),),
        )
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/"
    try:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "listening\n"
        with socket.create_connection(("127.0.0.1", int(url[17:-1])), LONG) as asking:
            asking.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert process.stdout.readline() == "asked\n"
            if way.startswith("SIG"):
                process.send_signal(getattr(signal, way))
                process.send_signal(getattr(signal, way))  # a second one changes nothing
            else:
                process.stdin.close()
            answer = b"".join(iter(lambda: asking.recv(4096), b""))
            assert b"finished" in answer
        assert process.wait(LONG) == 0
        assert process.stdout.read() == "draining\n"
        with pytest.raises(OSError):
            urllib.request.urlopen(url, timeout=LONG)
    finally:
        process.kill()
        process.wait(LONG)
        for pipe in (process.stdin, process.stdout):
            pipe.close()
