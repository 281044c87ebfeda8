"""Both ways of reading negatives give one loss, and a process of its own reports its memory."""

import pytest
import torch

from slipstream.bench import negative_memory
from slipstream.bench.step_samples import JaggedStep, batch_of
from tests.support.step_recipes import small_recipe

ITEMS = 40
LENGTHS = [1, 7, 12, 3]


def test_gathering_negatives_gives_the_same_loss():
    recipe, batch = small_recipe(), batch_of(LENGTHS, ITEMS, seed=4)
    ours = JaggedStep.of(recipe, ITEMS)(batch)
    gathered = JaggedStep.of(recipe, ITEMS, negative_memory.loss_of("gathered"))(batch)
    assert gathered == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize("variant", negative_memory.VARIANTS)
def test_every_variant_has_trainings_allocator(variant, monkeypatch, capsys):
    events: list[str] = []
    monkeypatch.setattr(
        negative_memory, "set_training_allocator", lambda: events.append("allocator")
    )
    monkeypatch.setattr(JaggedStep, "__call__", lambda step, batch: events.append("step") or 0.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    negative_memory.child(variant, LENGTHS, ITEMS, 1)
    assert events == ["allocator", *["step"] * negative_memory.STEPS]


@pytest.mark.system
def test_a_step_in_a_process_of_its_own_reports_its_memory():
    found = negative_memory.measure([20, 5], 50, threads=1, repeats=1)
    assert found["fused"][0]["losses"] == pytest.approx(found["gathered"][0]["losses"], rel=1e-4)
    assert found["fused"][0]["peak_bytes"] > 0
