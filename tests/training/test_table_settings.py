"""Tables with a width, an optimizer, a learning rate and a place of their own."""

import pytest
import torch

from slipstream.api.questions import stored_history
from slipstream.errors import SlipstreamError
from slipstream.serving.engine.engine import Engine
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.training.checkpoint import latest
from slipstream.training.export import bundle_in_memory
from slipstream.training.ranks import ALONE
from slipstream.training.recipe import Recipe, network_digest, trained_digest
from slipstream.training.recommendation import recommend
from slipstream.training.recommender import Recommender
from slipstream.training.run import make_sampler, open_run, train
from tests.support.training_fixtures import RICH, read_step, small_recipe, small_store

MIXED = {
    "item.colours": {"dim": 16, "optimizer": "rowwise_adam", "tier": "memory", "lr": 3e-3},
    "user.hobbies": {"dim": 4},
    "context.surface": {"dim": 4, "optimizer": "rowwise_adam"},
}


def mixed_recipe(place, schedule="synchronous", by_name=MIXED, **options):
    tables = {"optimizer": "rowwise_adagrad", "tier": "disk", "directory": str(place)}
    return small_recipe(
        tables={**tables, "cache_bytes": 1 << 16, "by_name": by_name},
        train={"schedule": schedule, "epochs": 3, "checkpoint_every": 3, **options},
        **RICH,
    )


def rows_of(run_dir, store):
    found = open_run(run_dir, store)[2]
    return {name: found.tables.all_rows(name).clone() for name in found.tables.tables} | dict(
        found.model.state_dict()
    )


def test_each_table_has_its_own_settings(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    made = Recommender.build(mixed_recipe(tmp_path / "rows"), store)
    tables = made.tables.tables
    assert isinstance(tables["item"], DiskTable)
    assert isinstance(tables["item.colours"], MemoryTable)
    assert {n: t.dim for n, t in tables.items() if t.dim != 8} == {
        "item.colours": 16,
        "user.hobbies": 4,
        "context.surface": 4,
    }
    assert tables["item.colours"].optimizer.name == "rowwise_adam"
    assert tables["item.colours"].optimizer.lr_factor == pytest.approx(3.0)
    assert tables["user.hobbies"].optimizer.name == "rowwise_adagrad"
    made.tables.close()


def test_a_learning_rate_of_its_own_is_that_of_a_run_with_it(tmp_path):
    store = small_store(tmp_path / "store", rich=True)

    def step(**tables):
        made = Recommender.build(small_recipe(tables=tables, item_features=["genre"]), store)
        batch = make_sampler(made.recipe, store, ALONE).next_batch()
        inputs = read_step(made, batch, 0)
        made.loss(inputs).backward()
        made.update([inputs], made.recipe.tables.lr)
        return {name: made.tables.all_rows(name) for name in ("item", "item.genre")}

    slow, fast = step(lr=0.5), step(lr=1.0)
    own = step(lr=0.5, by_name={"item.genre": {"lr": 1.0}})
    assert torch.equal(own["item"], slow["item"]) and not torch.equal(own["item"], fast["item"])
    assert torch.equal(own["item.genre"], fast["item.genre"])


def test_mixed_tables_train_alike_by_every_exact_schedule(tmp_path):
    """Disk and memory, widths 4, 8 and 16, two optimizers: the bits of the plain loop."""
    store = small_store(tmp_path / "store", rich=True)
    runs = {
        "synchronous": {},
        "dual_buffer": {},
        "frozen_window": {"micro_batches": 1},
        "nested": {"micro_batches": 1},
    }
    found = {}
    for schedule, options in runs.items():
        recipe = mixed_recipe(tmp_path / f"{schedule}-rows", schedule, **options)
        train(recipe, store, tmp_path / schedule, quiet=True)
        found[schedule] = rows_of(tmp_path / schedule, store)
    plain = found.pop("synchronous")
    for schedule, other in found.items():
        assert plain.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in plain.items()), schedule
    start = Recommender.build(mixed_recipe(tmp_path / "new"), store).tables
    for name in ("item", "item.colours", "user.hobbies", "context.surface", "context.device"):
        assert not torch.equal(start.all_rows(name), plain[name]), name


def test_a_mixed_run_goes_on_bit_for_bit(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    train(mixed_recipe(tmp_path / "a"), store, tmp_path / "whole", quiet=True)
    for steps in (4, None):
        recipe = mixed_recipe(tmp_path / "b", max_steps=steps)
        train(recipe, store, tmp_path / "cut", quiet=True)
    assert latest(tmp_path / "whole" / "checkpoints") is not None
    whole, cut = (rows_of(tmp_path / name, store) for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_a_bundle_with_widths_scores_as_offline(tmp_path, task):
    store = small_store(tmp_path / "store", rich=True)
    changes = {"task": "ranking", "tasks": {"like": {"column": "like"}}, "loss": {"kind": "bce"}}
    by_name = MIXED | ({"item": {"dim": 12}} if task == "ranking" else {})
    recipe = small_recipe(
        tables={"by_name": by_name}, **RICH, **(changes if task == "ranking" else {})
    )
    made = Recommender.build(recipe, store)
    engine = Engine(bundle_in_memory(made, store))
    users = [1, 3, 5]
    offline = recommend(made, store, users, 5)
    for user, expected in zip(users, offline, strict=True):
        history = stored_history(store, user, store.items, recipe.user_features)
        history = history.part(max(0, len(history) - 8), len(history))
        seen = stored_history(store, user, store.items).items
        items, scores = engine.retrieve(history, 5, exclude=seen)
        assert items == [store.items.id(row) for row in expected.items]
        assert scores == pytest.approx(expected.scores, abs=1e-6)


def test_a_schedule_names_the_table_it_cannot_keep(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    by_name = {"item.genre": {"optimizer": "adamw", "tier": "memory"}}
    recipe = mixed_recipe(tmp_path / "rows", "nested", by_name)
    with pytest.raises(SlipstreamError, match=r"'adamw' of table 'item.genre' updates rows"):
        train(recipe, store, tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tables": {"by_name": {"item.genres": {}}}}, "no table has this name; did you mean"),
        ({"tables": {"by_name": {"item": {"dim": 4}}}}, "they have one width"),
        ({"tables": {"by_name": {"item": {"dims": 4}}}}, "dims"),
        (
            {"tables": {"replicas": "averaged", "by_name": {"item": {"optimizer": "adamw"}}}},
            "cannot be averaged",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        small_recipe(item_features=["genre"], **changes)


def test_digests_change_with_what_decides_numbers_only():
    def digests(**own) -> tuple[str, str]:
        by_name = {"item.genre": own} if own else {}
        recipe: Recipe = small_recipe(item_features=["genre"], tables={"by_name": by_name})
        return trained_digest(recipe), network_digest(recipe)

    none = digests()
    assert digests(tier="disk") == none and digests(cache_bytes=1 << 20) == none
    slower = digests(lr=0.5)
    assert slower[0] != none[0] and slower[1] == none[1]
    for own in ({"dim": 4}, {"optimizer": "adamw"}):
        assert digests(**own)[0] != none[0] and digests(**own)[1] != none[1]
    assert digests(tier="hashed")[0] != none[0]
