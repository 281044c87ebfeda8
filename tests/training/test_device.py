"""Training with the dense part on a device: a stand-in that refuses host tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.training.device import HOST, DeviceTransfer, find_device, group_backend, tensors_in

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 900  # for a busy machine; time is not what is tested here

pytestmark = pytest.mark.timeout(SECONDS + 60)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    environment = {
        **os.environ,
        "SLIPSTREAM_BACKEND": "reference",
        "PYTHONPATH": os.environ["PYTHONPATH"],
    }
    command = [
        sys.executable,
        str(SUPPORT / "train_on_stand_in.py"),
        str(tmp_path_factory.mktemp("device")),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.system
def test_every_model_trains_evaluates_and_resumes_there_as_on_the_host(found: dict) -> None:
    cases = {name: case for name, case in found.items() if isinstance(case, dict)}
    assert len(cases) == 9
    for name, case in cases.items():
        assert case["steps"][0] == case["steps"][1] > 2, name
        assert case["difference"] < 1e-9, (name, case["difference"])
        host, device = case["metrics"]
        assert host and device == pytest.approx(host, abs=1e-9), name


@pytest.mark.system
def test_the_stand_in_would_have_noticed_a_host_tensor(found: dict) -> None:
    assert "mixes tensors of the device with host tensors" in found["mixed"]


@pytest.mark.system
def test_devices_are_found_by_name(found: dict) -> None:
    assert found["auto"] == "standin:0"
    assert (
        found["cuda"]
        == "device=cuda: torch sees a standin device, not cuda here; use device=standin"
    )
    assert found["standin:7"].startswith("device standin:7 does not exist here: torch sees 1")


def test_without_an_accelerator_the_host_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == HOST
    with pytest.raises(
        SlipstreamError, match="device=cuda: torch sees no accelerator here; use device=cpu"
    ):
        find_device("cuda")


def test_on_the_host_nothing_is_copied() -> None:
    transfer, rows_UD = DeviceTransfer(HOST), torch.ones(3, 2, requires_grad=True)
    assert transfer.copy(rows_UD) is rows_UD
    with transfer.ahead_of_compute():
        copied = transfer.mark({"rows": [rows_UD]})
    assert transfer.receive(copied)["rows"][0] is rows_UD
    assert list(tensors_in(copied)) == [rows_UD]


def test_host_tensors_always_travel_by_gloo() -> None:
    assert group_backend(HOST) == "gloo"
    assert group_backend(torch.device("cuda", 3)) == "cpu:gloo,cuda:nccl"
