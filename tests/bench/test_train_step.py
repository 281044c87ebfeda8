"""The whole-step benchmark: what it compares computes the same thing, and its figures follow from
what it measured.
"""

import json
import math

import pytest
import torch

from slipstream.bench import negative_memory, step_samples, train_step
from slipstream.bench.padded_baseline import PaddedBatch, PaddedHSTU, PaddedStep
from slipstream.bench.step_samples import JaggedStep, batch_of
from slipstream.bench.train_step import Sample, Shape, mfu_figures
from slipstream.config import load_recipe
from slipstream.training.recipe import Recipe

ITEMS = 40
LENGTHS = [1, 7, 12, 3]


def small_recipe(**changes) -> Recipe:
    """The shipped recipe of the comparison, cut down; no dropout unless asked for, because the two
    draw masks differently.
    """
    settings = {
        "model__max_len": 12,
        "model__dim": 10,
        "model__dropout": 0.0,
        "model__input_dropout": 0.0,
        "loss__negatives": 6,
    }
    return load_recipe(Recipe, "ml-1m-hstu", **(settings | changes))


def pair(recipe: Recipe) -> tuple[JaggedStep, PaddedHSTU]:
    ours, padded = JaggedStep.of(recipe, ITEMS), PaddedHSTU(recipe, ITEMS)
    padded.copy_weights(ours.recommender)
    return ours, padded


@pytest.mark.parametrize("loss_at", ["all", "real"])
@pytest.mark.parametrize("time_bias", ["next", "own"])
def test_the_padded_baseline_computes_the_same_loss_and_gradients(loss_at, time_bias):
    ours, padded = pair(small_recipe(model__time_bias=time_bias))
    batch = batch_of(LENGTHS, ITEMS, seed=3)
    inputs = ours.recommender.read(ours.recommender.plan_step(batch, 0))
    loss = ours.recommender.loss(inputs)
    loss.backward()
    assert inputs.plan.count == sum(LENGTHS)
    rectangles = PaddedBatch.of(batch, 12)
    negatives_BNR = torch.zeros(4, 12, 6, dtype=torch.int64)
    negatives_BNR[rectangles.valid_BN] = inputs.plan.negatives
    theirs = padded.loss_sum(rectangles, negatives_BNR, loss_at)
    theirs.backward()
    assert theirs.item() == pytest.approx(loss.item(), rel=1e-5)
    block, layer = padded.blocks[1], ours.recommender.model.backbone.layers[1]
    torch.testing.assert_close(block.uvqk_DF.grad.T, layer.uvqk_FD.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(block.time_W.grad, layer.relative.time_W.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        padded.items.weight.grad, inputs.lookups["item"].rows_UD.grad, rtol=1e-3, atol=1e-4
    )


def test_gathering_negatives_gives_the_same_loss(monkeypatch):
    recipe, batch = small_recipe(), batch_of(LENGTHS, ITEMS, seed=4)
    ours = JaggedStep.of(recipe, ITEMS)(batch)
    gathered = negative_memory.RetrievalLoss(negative_memory.gathered_softmax, "per_token")
    monkeypatch.setitem(negative_memory.RETRIEVAL_LOSSES, recipe.loss.kind, gathered)
    assert JaggedStep.of(recipe, ITEMS)(batch) == pytest.approx(ours, rel=1e-5)


def test_both_steps_learn():
    recipe, batch = (
        small_recipe(loss__temperature=0.5, optimizer__lr=0.01, tables__lr=0.01),
        batch_of([12] * 6, ITEMS),
    )
    ours, padded, rectangles = (
        JaggedStep.of(recipe, ITEMS),
        PaddedStep(recipe, ITEMS),
        PaddedBatch.of(batch, 12),
    )
    our_losses = [ours(batch) for _ in range(30)]
    padded_losses = [padded(rectangles) / 72 for _ in range(30)]
    assert our_losses[0] > 1.2 * our_losses[-1]
    assert padded_losses[0] > 1.2 * padded_losses[-1]


def test_movielens_like_lengths_have_its_median_and_mean():
    lengths = step_samples.movielens_like_lengths(100_000)
    assert lengths.min() == 20
    assert lengths.max() <= 2314
    assert math.isclose(sorted(lengths)[50_000], 96, rel_tol=0.03)
    assert math.isclose(lengths.mean(), 166, rel_tol=0.05)


def test_batches_are_jagged_and_have_a_next_behaviour_everywhere():
    batch = batch_of(LENGTHS, ITEMS, seed=5)
    assert batch.lengths_B.tolist() == LENGTHS
    inner = batch.items_T[1:][torch.isin(torch.arange(1, 23), batch.offsets_B1, invert=True)]
    before = batch.next_items_T[:-1][torch.isin(torch.arange(1, 23), batch.offsets_B1, invert=True)]
    assert torch.equal(inner, before)
    assert bool((batch.next_timestamps_T >= batch.timestamps_T).all())


def test_mfu_is_flops_over_time_and_peak():
    peaks = [Sample(1.0, 2.0, 100e9), Sample(1.0, 2.0, 300e9), Sample(1.0, 2.0, 100e9)]
    row = mfu_figures(
        50 * 10**9, [Sample(9.0, 9.0, 0.0), Sample(1.0, 1.6, 0.0), Sample(1.0, 1.6, 0.0)], peaks
    )
    assert row["mfu"] == pytest.approx(0.5)
    assert row["mfu_cpu"] == pytest.approx(50 / 1.6 / 50)
    assert row["gflops"] == pytest.approx(50)
    assert row["samples"] == [9.0, 1.0, 1.0]


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


def test_the_bench_writes_its_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    monkeypatch.setattr(
        train_step, "QUICK", [Shape(kind, "tiny", 1, 1, 1) for kind in ("hstu", "fuxi")]
    )
    monkeypatch.setattr(train_step, "MOVIELENS_USERS", 4)
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
    assert all(0 < row["mfu"] < 2 and row["samples"] for row in written["rows"] if "mfu" in row)
    assert torch.get_num_threads() == threads
    assert "ML-1M HSTU base step" in capsys.readouterr().out


def test_a_step_in_a_process_of_its_own_reports_its_memory():
    found = negative_memory.measure([20, 5], 50, threads=1, repeats=1)
    assert found["fused"][0]["losses"] == pytest.approx(found["gathered"][0]["losses"], rel=1e-4)
    assert found["fused"][0]["peak_bytes"] > 2**20
