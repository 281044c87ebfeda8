"""What a run says about itself: honest clocks, whole records, quiet where nobody should speak."""

import io
import itertools
import math
import time

import pytest
import torch
from rich.console import Console
from torch import nn

from slipstream.training.optimizers import (
    load_optimizer_tensors,
    make_adamw,
    optimizer_tensors,
    schedule_factor,
    step_dense,
)
from slipstream.training.recipe_sections import OptimizerConfig
from slipstream.training.telemetry import (
    Meter,
    MetricsFile,
    ProgressLine,
    describe,
    measure_peak_flops,
    read_metrics,
    resident_bytes,
)

RECORD = {
    "loss": 5.914,
    "tokens_per_second": 118_400.0,
    "mfu": 0.61,
    "memory_bytes": 1.24e9,
    "lr": 0.001,
    "HR@10": 0.2714,
}


def test_the_line_says_every_figure():
    assert (
        describe(RECORD, 192.0)
        == "loss 5.914  118k tokens/s  MFU 61 %  1.2 GB  lr 0.001  HR@10 .271  3:12 left"
    )
    assert describe({"loss": 1.0}, 3671.0) == "loss 1  1:01:11 left"
    assert describe({"loss": 0.5, "tokens_per_second": 900.0}, None) == "loss 0.5  900 tokens/s"


def line_on(terminal: bool, **options) -> tuple[ProgressLine, io.StringIO]:
    out = io.StringIO()
    return ProgressLine(
        3, console=Console(file=out, force_terminal=terminal, width=150), **options
    ), out


def test_plain_lines_off_a_terminal_are_few():
    line, out = line_on(False)
    for step in range(100):
        line.show(2, step, 100, "loss 1")
    line.close()
    assert out.getvalue() == "epoch 2/3 0 %  loss 1\n"


def test_a_terminal_sees_one_live_line():
    line, out = line_on(True)
    line.show(2, 62, 100, describe(RECORD, 192.0))
    time.sleep(0.15)
    line.close()
    assert (
        "epoch 2/3" in out.getvalue()
        and "62 %" in out.getvalue()
        and "HR@10 .271" in out.getvalue()
    )


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    line, out = line_on(True)
    line.show(1, 1, 2, "loss 1")
    line.print("something")
    line.close()
    assert out.getvalue() == ""


def test_speed_divides_by_wall_clock_time():
    meter = Meter(1e9)
    meter.add(1000, 1e7)
    time.sleep(0.05)
    reading = meter.read()
    assert 0 < reading["tokens_per_second"] <= 1000 / 0.05
    assert reading["mfu"] == pytest.approx(reading["tokens_per_second"] / 1000 * 1e7 / 1e9)
    assert meter.read()["tokens_per_second"] == 0
    assert "mfu" not in Meter(None).read()
    assert measure_peak_flops(1) > 1e8 and resident_bytes() > 1e7


def test_metrics_are_cut_back_to_the_resumed_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in range(1, 6):
        metrics.append({"step": step, "loss": step / 3})
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    metrics = MetricsFile(path, 3)
    metrics.append({"step": 4, "loss": 9.0})
    metrics.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(path)] == [
        (1, 1 / 3),
        (2, 2 / 3),
        (3, 1.0),
        (4, 9.0),
    ]


def test_learning_rate_rises_and_falls():
    config = OptimizerConfig(warmup_steps=4, decay="cosine", final_fraction=0.1)
    factors = [schedule_factor(config, step, 24) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0 and factors[14] == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))
    )
    assert factors[24] == pytest.approx(0.1) and all(
        a >= b for a, b in itertools.pairwise(factors[3:])
    )
    assert schedule_factor(OptimizerConfig(), 10**6, 5) == 1.0


def test_saved_optimiser_state_is_exact():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def grads(model, seed):
        torch.manual_seed(seed)
        (model(torch.randn(8, 4)) * 100).sum().backward()

    config = OptimizerConfig(lr=0.1)
    whole, cut = network(), network()
    optimizers = [make_adamw(model, config) for model in (whole, cut)]
    for step in range(3):
        for model, optimizer in zip((whole, cut), optimizers, strict=True):
            grads(model, step)
            step_dense(optimizer, model, 0.1, 1.0)
            assert all(p.grad is None for p in model.parameters())
    saved = {name: value.clone() for name, value in optimizer_tensors(optimizers[1], cut).items()}
    resumed = make_adamw(cut, config)
    load_optimizer_tensors(resumed, cut, saved)
    for model, optimizer in ((whole, optimizers[0]), (cut, resumed)):
        grads(model, 9)
        step_dense(optimizer, model, 0.1, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))
