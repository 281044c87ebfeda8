"""The figures of the whole-step benchmark follow from what it measured."""

import json

import pytest
import torch

from slipstream.bench import negative_memory, train_step
from slipstream.bench.train_step import Sample, Shape, add_mfu, step_figures


def test_mfu_is_flops_over_time_and_the_best_sample_of_the_peak():
    peaks = [Sample(1.0, 2.0, 100e9), Sample(1.0, 2.0, 200e9), Sample(1.0, 2.0, 100e9)]
    steps = [Sample(9.0, 9.0, 0.0, 7), Sample(1.0, 1.6, 0.0, 3), Sample(1.0, 1.6, 0.0, 3)]
    row = {"flops": 50 * 10**9} | step_figures(50 * 10**9, steps, peaks)
    add_mfu([row], [*peaks, Sample(1.0, 2.0, 400e9)])  # the best one was taken beside another row
    assert row["mfu"] == pytest.approx(50 / 400)
    assert row["mfu_median_peak"] == pytest.approx(0.5)
    assert row["mfu_cpu"] == pytest.approx(50 / 1.6 / 200)
    assert row["gflops"] == pytest.approx(50) and row["page_faults"] == 3
    assert row["samples"] == [9.0, 1.0, 1.0]


def test_no_step_of_either_side_runs_before_the_allocator_is_trainings(monkeypatch, tmp_path):
    events: list[str] = []
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    monkeypatch.setattr(train_step, "MOVIELENS_USERS", 2)
    monkeypatch.setattr(train_step, "PEAK_PRODUCTS", 1)
    monkeypatch.setattr(train_step, "QUICK", [])
    monkeypatch.setattr(train_step, "claims", lambda *parts: {})
    monkeypatch.setattr(train_step, "_print", lambda *parts: None)
    monkeypatch.setattr(train_step, "measure_memory", lambda repeats: [])
    monkeypatch.setattr(
        train_step, "set_training_allocator", lambda: events.append("allocator") or "kept"
    )
    for side in ("JaggedStep", "PaddedStep"):
        monkeypatch.setattr(
            getattr(train_step, side),
            "__call__",
            lambda step, batch: events.append(type(step).__name__) or 0.0,
        )
    result = train_step.run(quick=True)
    assert events[0] == "allocator" and events.count("allocator") == 1
    assert {"JaggedStep", "PaddedStep"} == set(events[1:])
    assert result["freed_memory"] == "kept"
    # A turn is a step that does not count, and some that do, of one variant in a row.
    turn = 1 + train_step.STEPS_A_TURN
    assert events[1 : 1 + 2 * turn] == ["JaggedStep"] * turn + ["PaddedStep"] * turn
    ours = next(row for row in result["rows"] if row["variant"] == "ml-1m jagged")
    rounds = events.count("JaggedStep") // turn
    assert len(ours["samples"]) == train_step.STEPS_A_TURN * (rounds - 1)


def test_long_shapes_are_the_named_sizes_in_full():
    assert [shape.name for shape in train_step.FULL] == [
        f"{kind}-{size}"
        for size in ("tiny", "small", "medium", "large", "long")
        for kind in ("hstu", "fuxi")
    ]
    recipe = train_step.FULL[-1].recipe()
    assert (recipe.model.blocks, recipe.model.dim, recipe.model.max_len) == (16, 1024, 4096)
    assert all(shape.repeats >= 3 for shape in train_step.FULL)


def test_windows_of_the_movielens_step_leave_room_for_what_is_held_out(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    lengths, source = train_step.movielens_lengths()
    assert source == "drawn like MovieLens-1M"
    assert len(lengths) == 128
    assert min(lengths) >= 17
    assert max(lengths) == 200


@pytest.mark.system
def test_the_bench_writes_its_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    monkeypatch.setattr(
        train_step, "QUICK", [Shape(kind, "tiny", 1, 1, 1) for kind in ("hstu", "fuxi")]
    )
    small = {"THREADS": 1, "PEAK_PRODUCTS": 1, "MOVIELENS_USERS": 4, "MOVIELENS_LENGTH": 24}
    small["ITEMS"] = 500
    for name, value in small.items():
        monkeypatch.setattr(train_step, name, value)
    monkeypatch.setattr(Shape, "name", property(lambda shape: f"{shape.kind}-long"))
    # The children that measure memory need seconds to start; here one pair of samples stands for
    # them.
    samples = {
        "fused": [{"step_bytes": 10, "peak_bytes": 50}],
        "gathered": [{"step_bytes": 100, "peak_bytes": 150}],
    }
    monkeypatch.setattr(negative_memory, "measure", lambda *arguments: samples)
    threads = torch.get_num_threads()
    result = train_step.run(quick=True, json_path=tmp_path / "step.json")
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["claims"] == result["claims"]
    assert set(written["claims"]) == {
        "mfu_hstu_long",
        "mfu_fuxi_long",
        "x_over_padded_ml1m",
        "negative_memory_saved",
    }
    assert written["claims"]["negative_memory_saved"] == pytest.approx(0.9)
    timed = [row for row in written["rows"] if "flops" in row]
    assert len(timed) == 5 and all(row["mfu"] > 0 and row["samples"] for row in timed)
    assert len({row["peak_gflops"] for row in timed}) == 1  # one peak for the whole run
    assert written["command"] and written["freed_memory"]
    assert torch.get_num_threads() == threads
    assert "ML-1M HSTU base step" in capsys.readouterr().out
