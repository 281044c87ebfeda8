"""A process beats while it serves, and ends by signals, its supervisor's word or its death."""

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from slipstream.serving.heartbeat import Heartbeat
from slipstream.serving.http.process import listening_socket
from slipstream.serving.http.process_life import END_NOW
from tests.support.serving_fixtures import wait_until

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

linger, beat = float(sys.argv[2]), sys.argv[3]
settings = ProcessSettings(
    socket_fd=int(sys.argv[1]), linger=linger, watch_parent=True, heartbeat=beat
)
run_app(app, settings, start_draining)
"""


@pytest.mark.system
@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "the supervisor's death", "its word"])
def test_the_request_under_way_is_finished_before_the_end(tmp_path: Path, way: str):
    beat, linger = Heartbeat(tmp_path / "beat"), 1_000.0 if way == "its word" else 0.1
    with listening_socket("127.0.0.1", 0) as bound:
        process = subprocess.Popen(
            [sys.executable, "-c", APP, str(bound.fileno()), str(linger), str(tmp_path / "beat")],
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
            wait_until(lambda: beat.silent_since() is not None, LONG)
            first = beat.read()
            wait_until(lambda: beat.read() > first, LONG)
            if way.startswith("SIG"):
                process.send_signal(getattr(signal, way))
                process.send_signal(getattr(signal, way))  # a second one changes nothing
            elif way == "its word":
                process.stdin.write(END_NOW.decode())
                process.stdin.flush()
            else:
                process.stdin.close()
            answer = b"".join(iter(lambda: asking.recv(4096), b""))
            assert b"finished" in answer
        assert process.wait(LONG) == 0
        assert beat.begun and beat.silent_since() is None
        assert process.stdout.read() == "draining\n"
        with pytest.raises(OSError):
            urllib.request.urlopen(url, timeout=LONG)
    finally:
        process.kill()
        process.wait(LONG)
        for pipe in (process.stdin, process.stdout):
            pipe.close()
