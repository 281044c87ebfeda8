"""The benchmark of negatives, at sizes a test can afford."""

import json

import pytest
import torch

from benchmarks.negatives import bench as negatives
from benchmarks.negatives import ranks as negative_ranks
from benchmarks.negatives import steps as negative_steps
from slipstream.bench.step_samples import JaggedStep, batch_of

LENGTHS, ITEMS = [24, 10, 17], 400


def test_every_way_of_fetching_gives_the_same_loss():
    """What is timed against each other computes the same thing."""
    batch, losses = batch_of(LENGTHS, ITEMS), {}
    for way in negative_steps.VARIANTS:
        step = negative_steps.variant_step(way, ITEMS, dim=16, negatives=8, segment_bytes=1 << 13)
        losses[way] = [step(batch) for _ in range(3)]
    assert losses["gathered"] == pytest.approx(losses["fused"], rel=1e-5)
    assert losses["segmented"] == pytest.approx(losses["fused"], rel=1e-5)
    assert losses["segmented fp16"] == pytest.approx(losses["fused"], rel=1e-3)


def test_every_way_has_trainings_allocator_before_its_first_step(monkeypatch, capsys):
    """In the process that measures time, and in each that measures memory."""
    events: list[str] = []
    for module in (negatives, negative_steps):
        monkeypatch.setattr(module, "set_training_allocator", lambda: events.append("allocator"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(JaggedStep, "__call__", lambda step, batch: events.append("step") or 0.0)
    for way in negative_steps.VARIANTS:
        events.clear()
        negative_steps.child(way, [2], LENGTHS, ITEMS, 1)
        assert events == ["allocator", *["step"] * negative_steps.STEPS]

    events.clear()
    for part in ("sharing_rows", "byte_rows", "claims", "finish"):
        monkeypatch.setattr(negatives, part, lambda *words, **options: ([], {}))
    monkeypatch.setattr(negatives, "claims", lambda *rows: {})
    monkeypatch.setattr(negatives, "fetch_rows", lambda *sizes: events.append("step") or [])
    negatives.run(quick=True)
    assert events == ["allocator", "step"]


def test_memory_is_read_in_a_process_of_its_own():
    found = {
        way: negative_steps.memory_of(way, [64], [64] * 4, 5_000, threads=1)[64]
        for way in ("gathered", "segmented")
    }
    assert all(sample["step_bytes"] > 0 for sample in found.values())
    assert found["gathered"]["losses"] == pytest.approx(found["segmented"]["losses"], rel=1e-4)


def test_bytes_between_two_ranks_halve():
    found = negative_ranks.measure(LENGTHS, 5_000, 16)
    full, half = found["fp32"], found["fp16"]
    assert full["16 bits"] == 0 and full["keys"] == half["keys"] > 0
    assert half["16 bits"] / (full["exact"] - half["exact"]) == pytest.approx(0.5, abs=1e-3)


def test_the_whole_command_writes_its_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(negatives, "THREADS", 1)
    monkeypatch.setattr(negatives, "QUICK_ITEMS", 2_000)
    monkeypatch.setattr(negatives, "QUICK_COUNTS", (4,))
    monkeypatch.setattr(negatives, "QUICK_LENGTHS", [10, 7])
    monkeypatch.setattr(negatives, "movielens_lengths", lambda: ([6, 9], "made up"))
    sizes = {"gathered": 900, "fused": 500, "segmented": 110, "segmented fp16": 90}

    def memory(way, counts, lengths, items, threads):
        return {
            count: {
                "step_bytes": 10 if count == 1 else sizes[way],
                "peak_bytes": 1000,
                "losses": [1.0],
            }
            for count in counts
        }

    monkeypatch.setattr(negative_steps, "memory_of", memory)
    bytes_sent = {
        "fp32": {"keys": 8.0, "exact": 100.0, "16 bits": 0.0},
        "fp16": {"keys": 8.0, "exact": 20.0, "16 bits": 40.0},
    }
    monkeypatch.setattr(negative_ranks, "measure", lambda *asked: bytes_sent)
    threads = torch.get_num_threads()
    negatives.run(quick=True, json_path=tmp_path / "negatives.json")
    assert torch.get_num_threads() == threads
    written = json.loads((tmp_path / "negatives.json").read_text())
    claims = written["claims"]
    wanted = {
        "segmented_memory_saved",
        "segmented_step_ratio",
        "segmented_vs_fused",
        "fp16_bytes_ratio",
        "share_k4_step_ratio",
        "extra_lookups",
    }
    assert wanted <= set(claims)
    assert (
        claims["segmented_memory_saved"] == pytest.approx(1 - 100 / 890)
        and claims["fp16_bytes_ratio"] == 0.5
    )
    assert claims["extra_lookups"] == 0 and claims["share_k4_step_ratio"] > 0
    assert any(
        row["variant"] == "ml-1m: 128 own, k=4" and row["extra_lookups"] == 0
        for row in written["rows"]
    )
    fewer = next(row for row in written["rows"] if row["variant"] == "ml-1m: 128 per step")
    assert fewer["extra_lookups"] < 0  # the count can move
