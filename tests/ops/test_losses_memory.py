"""Peak memory of a step with 128 negatives, measured by the kernel of the operating system in a
fresh process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.operator_parity import needs_native

PROGRAM = """
import json, pathlib, torch
from slipstream.ops import losses

def resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def gathered(hidden_TD, rows_UD, targets_T, negatives_TR):
    candidates_TR1D = rows_UD[torch.cat([targets_T.unsqueeze(1), negatives_TR], dim=1)]
    logits = torch.einsum("td,trd->tr", hidden_TD, candidates_TR1D)
    return torch.logsumexp(logits, dim=1) - logits[:, 0]

def grow(function):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    hidden_TD, rows_UD = torch.randn(tokens, width, requires_grad=True), torch.randn(num_rows, width, requires_grad=True)
    function(hidden_TD, rows_UD, targets_T, negatives_TR).sum().backward()
    return resident("VmHWM") - before

torch.set_num_threads(1)
width, num_rows = 64, 5000
targets_T, negatives_TR = torch.randint(num_rows, (16,)), torch.randint(num_rows, (16, 128))
tokens = 16
for function in (losses.sampled_softmax_loss, gathered):  # warm up: libraries and thread pools
    grow(function)
tokens = 3000
targets_T, negatives_TR = torch.randint(num_rows, (tokens,)), torch.randint(num_rows, (tokens, 128))
print(json.dumps({"fused": grow(losses.sampled_softmax_loss), "gathered": grow(gathered), "negatives": tokens * 128 * width * 4}))
"""


@needs_native
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_a_step_needs_at_most_40_percent_of_the_memory_of_gathering():
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"]}
    environment.pop("SLIPSTREAM_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peaks = json.loads(done.stdout)
    assert peaks["gathered"] > peaks["negatives"], (
        "the yardstick must hold tokens x negatives x width"
    )
    assert peaks["fused"] <= 0.4 * peaks["gathered"], peaks
