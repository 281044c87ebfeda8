"""`slipstream doctor` tells what is here and what to do about what is not."""

import json
import shutil

import pytest

from slipstream.cli import doctor_command
from slipstream.cli.app import run_command
from slipstream.ops import native


def test_every_check_has_a_state_and_what_is_missing_has_something_to_do(capsys):
    assert run_command(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert len(checks) == len(doctor_command.CHECKS)
    for check in checks:
        assert check["state"] in ("ok", "missing", "note") and check["found"]
        assert check["todo"] or check["state"] != "missing"


def test_a_machine_without_tools_is_told_what_to_install(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(native, "status", lambda: "native kernels: not built")
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command(["doctor"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "about 10x slower",
        "apt-get install g++",
        "redis-server",
        "chromium",
        "iproute2",
    ):
        assert words in shown
    assert "are missing; the last column says what to do" in shown
