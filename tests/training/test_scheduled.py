"""Recipes with a schedule: the plain loop's training, resumed exactly, traced, or refused."""

import pytest
import torch
from safetensors.torch import load_file

from slipstream.cli.app import run_command
from slipstream.errors import SlipstreamError
from slipstream.pipeline.trace import read_trace
from slipstream.tables.slices import Placement
from slipstream.training import checkpoint, loop
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import trained_digest
from slipstream.training.recommender import Recommender
from slipstream.training.run import train
from slipstream.training.scheduled import load_stale_rows, recipe_schedule, stale_row_files
from slipstream.training.telemetry import read_metrics
from tests.support.pipeline_problem import lanes_left
from tests.support.training_fixtures import RICH, small_recipe, small_store


def recipe_of(schedule, tables=(), features=(), **train_options):
    options = {"schedule": schedule, "epochs": 4, "checkpoint_every": 3, **train_options}
    return small_recipe(
        tables={"optimizer": "rowwise_adam", **dict(tables)},
        optimizer={"decay": "cosine", "warmup_steps": 3},
        train=options,
        **dict(features),
    )


def trained(directory):
    newest = checkpoint.latest(directory / "checkpoints")
    tensors = load_file(newest / checkpoint.TENSORS)
    return {name: value for name, value in tensors.items() if not name.startswith("random/")}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.fixture
def store(tmp_path):
    return small_store(tmp_path / "store")


def test_a_schedule_that_does_not_cut_gives_the_bits_of_the_plain_loop(store, tmp_path):
    train(recipe_of("synchronous"), store, tmp_path / "plain", quiet=True)
    train(recipe_of("dual_buffer"), store, tmp_path / "dual", quiet=True)
    train(recipe_of("nested", micro_batches=1), store, tmp_path / "nested", quiet=True)
    deep = recipe_of("nested", micro_batches=1, buffers_ahead=3)
    train(deep, store, tmp_path / "deep", quiet=True)
    plain = trained(tmp_path / "plain")
    for name in ("dual", "nested", "deep"):
        assert same(trained(tmp_path / name), plain)
    assert not lanes_left()


@pytest.mark.parametrize("cluster", (True, False))
def test_cutting_changes_only_rounding(store, tmp_path, cluster):
    for name, options in {
        "plain": ("synchronous", {}),
        "cut": ("nested", {"micro_batches": 3, "cluster": cluster}),
    }.items():
        train(
            recipe_of(options[0], **options[1]),
            store,
            tmp_path / name,
            quiet=True,
            dtype=torch.float64,
        )
    plain, cut = trained(tmp_path / "plain"), trained(tmp_path / "cut")
    assert plain.keys() == cut.keys()
    assert (
        max(float((plain[name].double() - cut[name].double()).abs().max()) for name in plain) < 1e-9
    )


CUT = {"micro_batches": 3, "epochs": 2}


@pytest.mark.parametrize(
    ("schedule", "options", "tables"),
    [
        ("dual_buffer", {"epochs": 2}, {}),
        ("nested", CUT, {}),
        ("nested", {**CUT, "cluster": False}, {"tier": "hashed"}),
        ("frozen_window", CUT, {"tier": "disk", "cache_bytes": 1 << 16}),
        ("frozen_window", CUT, {"optimizer": "rowwise_adagrad"}),
    ],
)
def test_features_with_several_values_train_alike_by_every_schedule(
    tmp_path, schedule, options, tables
):
    store = small_store(tmp_path / "store", rich=True)
    optimizer = {"optimizer": tables["optimizer"]} if "optimizer" in tables else {}
    plain = recipe_of("synchronous", optimizer, RICH, epochs=2)
    if tables.get("tier") == "disk":
        tables = {**tables, "directory": str(tmp_path / "rows")}
    found = {}
    for name, recipe in (("plain", plain), ("other", recipe_of(schedule, tables, RICH, **options))):
        train(recipe, store, tmp_path / name, quiet=True, dtype=torch.float64)
        newest = checkpoint.latest(tmp_path / name / "checkpoints")
        in_memory = "hashed" if tables.get("tier") == "hashed" and name == "other" else "memory"
        place = recipe.tables.model_copy(update={"tier": in_memory, "directory": None})
        found[name] = Recommender.build(
            recipe.model_copy(update={"tables": place}), store, torch.float64
        )
        checkpoint.load_weights(newest, found[name])
    for name in found["plain"].tables.tables:
        expected, other = (found[each].tables.all_rows(name) for each in ("plain", "other"))
        assert float((expected - other).abs().max()) < 1e-9, name
    start = Recommender.build(plain, store, torch.float64).tables.all_rows("item.colours")
    assert float((found["other"].tables.all_rows("item.colours") - start).abs().min()) > 0


@pytest.mark.parametrize("schedule", ("nested", "frozen_window", "semi_async", "six_stage"))
def test_an_interrupted_run_goes_on_bit_for_bit(store, tmp_path, schedule, monkeypatch):
    recipe = recipe_of(schedule, micro_batches=2, epochs=8, staleness=2, synchronous_steps=3)
    train(recipe, store, tmp_path / "whole", quiet=True)
    stops, real = iter((2, 5, 8)), loop.run_loop

    def stopped_in_the_middle(recipe, steps, loader, progress, hooks, ranks):
        at, on_step = next(stops, None), hooks.on_step
        hooks.on_step = lambda progress, batch: (
            on_step(progress, batch),
            hooks.stop.set() if progress.step == at else None,
        )
        return real(recipe, steps, loader, progress, hooks, ranks)

    monkeypatch.setattr("slipstream.training.run.run_loop", stopped_in_the_middle)
    statuses = [train(recipe, store, tmp_path / "cut", quiet=True).status for _ in range(4)]
    assert statuses[:3] == ["interrupted"] * 3 and statuses[3] == "finished"
    assert same(trained(tmp_path / "cut"), trained(tmp_path / "whole")) and not lanes_left()


def test_a_run_leaves_a_trace_that_can_be_drawn(store, tmp_path, capsys):
    train(recipe_of("nested", micro_batches=2, log_every=2), store, tmp_path / "run", quiet=True)
    intervals, about = read_trace(tmp_path / "run" / "trace.json")
    assert about["schedule"] == "nested" and {each.stage for each in intervals} >= {
        "load",
        "retrieve",
        "compute",
        "write",
    }
    assert any(
        "exposed_lookup" in record for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
    )
    assert run_command(["trace", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "exposed_lookup" in said and "trace.png" in said
    assert (tmp_path / "run" / "trace.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_a_trace_says_what_to_do(tmp_path):
    assert run_command(["trace", str(tmp_path)]) == 1


def test_auto_says_what_it_chose_and_why(store, tmp_path, capsys):
    train(recipe_of("nested", micro_batches="auto", epochs=8), store, tmp_path / "run")
    assert "micro-batches" in capsys.readouterr().err
    assert not lanes_left()


def test_recipes_reach_the_schedule_and_the_digest():
    stale = recipe_of("semi_async", staleness=2, synchronous_steps=5)
    assert (recipe_schedule(stale).staleness, recipe_schedule(stale).synchronous_steps) == (2, 5)
    assert (
        len(
            {
                trained_digest(recipe_of("six_stage", **options))
                for options in ({}, {"staleness": 2}, {"synchronous_steps": 1})
            }
        )
        == 3
    )
    assert trained_digest(recipe_of("nested", staleness=3)) == trained_digest(recipe_of("nested"))
    deep = recipe_of("nested", buffers_ahead=3)
    assert recipe_schedule(deep).buffers_ahead == 3
    assert trained_digest(deep) == trained_digest(recipe_of("nested"))
    with pytest.raises(SlipstreamError, match="cannot work 3 buffers ahead"):
        recipe_schedule(recipe_of("frozen_window", buffers_ahead=3))


def test_what_stale_ranks_remember_is_read_by_any_number_of_ranks(tmp_path):
    keys, weights = torch.arange(40), torch.arange(80.0).view(40, 2)
    for rank in range(2):
        mine = Placement(2).owner_of(keys) == rank
        files = stale_row_files(
            {7: {"feature/colour": (keys[mine], weights[mine])}}, Ranks(rank=rank, world=2)
        )
        for name, tensors in files.items():
            checkpoint.write_tensors(tmp_path / name, tensors)
    assert stale_row_files({7: {}}, Ranks(rank=2, world=4, replicas=2)) == {}  # the second replica
    for shards in (1, 2, 3):
        found = [
            load_stale_rows(tmp_path, Ranks(rank=rank, world=shards))[7]["feature/colour"]
            for rank in range(shards)
        ]
        for rank, (found_keys, found_weights) in enumerate(found):
            mine = Placement(shards).owner_of(keys) == rank
            assert torch.equal(found_keys, keys[mine]) and torch.equal(found_weights, weights[mine])


def test_stale_rows_of_earlier_checkpoints_still_load(tmp_path):
    rows = {7: {"item": (torch.arange(4), torch.arange(8.0).view(4, 2))}}
    ((name, tensors),) = stale_row_files(rows, ALONE).items()
    assert name == "stale-rows-00000.safetensors"
    checkpoint.write_tensors(tmp_path / "moved-00000.safetensors", tensors)
    found_keys, found_weights = load_stale_rows(tmp_path, ALONE)[7]["item"]
    assert torch.equal(found_keys, rows[7]["item"][0])
    assert torch.equal(found_weights, rows[7]["item"][1])


def test_a_table_optimizer_that_updates_all_rows_is_refused(store, tmp_path):
    recipe = small_recipe(tables={"optimizer": "adamw"}, train={"schedule": "nested"})
    with pytest.raises(SlipstreamError, match="updates rows that no batch touched"):
        train(recipe, store, tmp_path / "run", quiet=True)
