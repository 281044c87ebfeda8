"""Recipes: what they refuse, what their digests leave out, and that earlier ones keep loading."""

import json
from datetime import date

import pytest
import yaml
from pydantic import ValidationError

from slipstream.config import load_recipe
from slipstream.errors import SlipstreamError
from slipstream.training.recipe import Recipe, network_digest, trained_digest
from slipstream.training.run import open_run, read_recipe, train
from tests.support.training_fixtures import small_recipe, small_store

# (recipe, trained digest, network digest) as commit 0ee4e74 computed them: a run that was started
# before `tables.rule` became `tables.optimizer` is still recognised.
DIGESTS = [
    (
        {"name": "a"},
        "0f79fdd00412085c51ef0ac3ada967ad195b5b0f3b9e2ea38fb21940f79db2f3",
        "bcee85f9634f5e06fd2cbd360d85050f122d8a0e547def7b03c83cebab978950",
    ),
    (
        {"name": "a", "tables": {"rule": "adamw"}},
        "30ff26ca04cb563f37e29d5a26f0b07885fecc5eba660e1c94a0c239992fcf0c",
        "89aba8109c075cad0aa51f30d5b07cbc537972b34c3aec5cc7f2e86970045fa4",
    ),
    (
        {
            "name": "a",
            "tables": {"rule": "rowwise_adagrad", "tier": "hashed", "max_rows": 9},
            "train": {"schedule": "nested", "micro_batches": 4},
        },
        "69c2dd202a7043d43fa2bbf19b13d5b8ef87c60097d70076a86d99589371c68e",
        "77124e6fce5638d282a2995d40ecb65485d80471d53494c866fb6368b3510f88",
    ),
    (
        {
            "name": "a",
            "tables": {"replicas": "averaged"},
            "optimizer": {"decay": "cosine"},
            "train": {"schedule": "semi_async", "staleness": 2},
        },
        "9e53a401794319e53fae1cceaf30588d292600534dc730d8ace7246c7e40b8fc",
        "bcee85f9634f5e06fd2cbd360d85050f122d8a0e547def7b03c83cebab978950",
    ),
    (
        {
            "name": "a",
            "task": "ranking",
            "loss": {"kind": "bce"},
            "tasks": {"click": {"column": "c"}},
        },
        "332aff50d78c00ea5dea63314cf011ca117dbe889e493daa779e37d6f3dc52aa",
        "463e2d715061cc96473565a2a95e337a45ef6731274d962e7043dbddd53ed126",
    ),
]
SHIPPED = {
    "demo": (
        "c4d565dd511b461f171e0bc7c0ad76673d73d17c6d2fdfbc15738b73dd3dd92e",
        "952ac3d21c504fc06d955600b32d728e5cc6a6cc2338e3ca1f377d483abbbc69",
    ),
    "kuairand-pure-ranking": (
        "df23707fa9fb6765392c0de10bcdd90c0bf5f77d4d26e1fa3c118e76ae9b6f50",
        "618f639acd1e3c57fcf1ae8a56926e626d058c45996c6da14e423c1f0fbadf89",
    ),
    "ml-1m-fuxi": (
        "27499ea9b98daddfa44c4e7c71bcc2fc51d40845ba230aae6dddb1f2521cf39e",
        "6c8d82bbf2ab9f8a2833de4c441d5840fa0b5b86fc5068840a1d336f5f52b467",
    ),
    "ml-1m-hstu": (
        "e5495101509eecf1796dc02eb3819a40f2bfbd3fb11048e26d3e310e96861edc",
        "cefe97a00391d29a547577354f6e1fe752490c79adea6ee89a2d2af838388c5e",
    ),
    "ml-1m-hstu-full": (
        "acbd5078f231bbe7cb3bb6ac2a9a8bd8493277c399697df4b8af655060efd3c3",
        "c55e1db08239445d19c47b4db17bb4bbda9bfc94305f36c9cf694e59664486d2",
    ),
    "ml-1m-sasrec": (
        "98c9893075ef18c7d625161c0a544c781a0f90eff2d806df00675ba88bc67020",
        "713762b22bf7c34714c69c5d6c1e3fd88fc9cc3d5564c55e16283ab5ac8edddb",
    ),
}


@pytest.mark.parametrize(("content", "trained", "network"), DIGESTS)
def test_digests_are_those_of_earlier_versions(content, trained, network):
    recipe = Recipe.model_validate(content)
    assert (trained_digest(recipe), network_digest(recipe)) == (trained, network)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_have_the_digests_of_earlier_versions(name):
    dense = name.startswith("ml-1m") or name == "demo"  # the optimizer they shipped with
    earlier = ["tables.optimizer=adamw", "tables.lr=1e-3"] if dense else []
    recipe = load_recipe(Recipe, name, earlier)
    assert (trained_digest(recipe), network_digest(recipe)) == SHIPPED[name]


@pytest.mark.parametrize("override", ["rule=adamw", "tables.rule=adamw", "tables.optimizer=adamw"])
def test_a_recipe_and_an_override_may_use_the_earlier_name_of_the_row_optimizer(tmp_path, override):
    path = tmp_path / "old.yaml"
    path.write_text("name: old\ntables: {rule: rowwise_adagrad}\n")
    assert load_recipe(Recipe, path).tables.optimizer == "rowwise_adagrad"
    assert load_recipe(Recipe, path, [override]).tables.optimizer == "adamw"


def test_both_names_at_once_are_refused_in_one_sentence(tmp_path):
    path = tmp_path / "both.yaml"
    path.write_text("name: both\ntables: {rule: adamw, optimizer: adamw}\n")
    with pytest.raises(SlipstreamError, match="'rule' is called 'optimizer' now; give only"):
        load_recipe(Recipe, path)
    with pytest.raises(ValidationError, match="'rule' is called 'optimizer' now; give only"):
        Recipe.model_validate({"name": "both", "tables": {"rule": "adamw", "optimizer": "adamw"}})


def test_a_run_of_an_earlier_version_is_opened_and_resumed(tmp_path):
    store = small_store(tmp_path / "store")
    short, long = (small_recipe(train={"max_steps": steps, "epochs": 9}) for steps in (2, 4))
    train(short, store, tmp_path / "run", quiet=True)
    for name, read, write in (
        ("run.json", json.loads, json.dumps),
        ("recipe.yaml", yaml.safe_load, yaml.safe_dump),
    ):
        content = read((tmp_path / "run" / name).read_text())
        tables = content.get("recipe", content)["tables"]
        tables["rule"] = tables.pop("optimizer")
        for younger in ("repeat", "window"):
            del content.get("recipe", content)[younger]
        (tmp_path / "run" / name).write_text(write(content))
    assert read_recipe(tmp_path / "run") == short
    assert load_recipe(Recipe, tmp_path / "run" / "recipe.yaml") == short
    assert open_run(tmp_path / "run", store)[0] == short
    assert train(long, store, tmp_path / "run", quiet=True).step == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss": {"temprature": 1.0}}, "Extra inputs"),
        ({"split": {"tset": 1}}, "did you mean 'test'"),
        ({"task": "ranking"}, "needs tasks"),
        ({"task": "ranking", "tasks": {"click": {"column": "click"}}}, "must be bce"),
        ({"tasks": {"click": {"column": "click"}}}, "a retrieval recipe has none"),
        ({"tables": {"replicas": "averaged", "optimizer": "adamw"}}, "use replicas=exact"),
    ],
)
def test_recipes_refuse_what_they_do_not_know(changes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        small_recipe(**changes)


def test_bookkeeping_is_not_part_of_what_is_trained():
    assert trained_digest(small_recipe(train={"keep_last": 5})) == trained_digest(small_recipe())
    balanced = {"balance": "lpt", "cost_linear": 2.0, "cost_quadratic": 0.1}
    assert trained_digest(small_recipe(sampler=balanced)) == trained_digest(small_recipe())
    assert trained_digest(small_recipe(optimizer={"lr": 0.5})) != trained_digest(small_recipe())
    for elsewhere in ({"threads": 3}, {"device": "cuda"}, {"schedule": "nested"}):
        assert trained_digest(small_recipe(train=elsewhere)) == trained_digest(small_recipe())
    stale = small_recipe(train={"schedule": "semi_async"})
    assert trained_digest(stale) != trained_digest(small_recipe())
    averaged = {"replicas": "averaged", "average_every": 4, "optimizer": "rowwise_adam"}
    assert trained_digest(
        small_recipe(tables=averaged, train={"checkpoint_every": 7})
    ) == trained_digest(small_recipe(tables=averaged))
    cosine = {"optimizer": {"decay": "cosine"}}
    assert trained_digest(small_recipe(**cosine, train={"epochs": 3})) != trained_digest(
        small_recipe(**cosine)
    )


@pytest.mark.parametrize("changes", [{"repeat": "allow"}, {"window": "stepped"}])
def test_the_rules_of_evaluation_count_only_where_they_are_not_the_defaults(changes):
    content = {**small_recipe().model_dump(mode="json"), "repeat": "exclude", "window": "latest"}
    assert trained_digest(Recipe.model_validate(content)) == trained_digest(small_recipe())
    assert trained_digest(small_recipe(**changes)) != trained_digest(small_recipe())
    assert network_digest(small_recipe(**changes)) == network_digest(small_recipe())


def test_splits_and_windows_change_the_digest_only_where_they_are_used():
    plain, dates = Recipe(name="x"), {"validation_from": date(2024, 5, 1), "test_from": 1714608000}
    for changes in (
        {"split": {"by": "users", "validation": 0.1, "test": 0.1}},
        {"split": {"by": "time", **dates}},
        {"sampler": {"windows": 2}},
    ):
        assert trained_digest(Recipe(name="x", **changes)) != trained_digest(plain)
    same = Recipe(name="x", split={"by": "last"}, sampler={"windows": 1})
    assert trained_digest(same) == trained_digest(plain)
    assert Recipe(name="x", split={"by": "time", **dates}).split.validation_from == "2024-05-01"


def test_a_split_is_chosen_by_overrides(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\n")
    words = ["split.by=time", "split.validation_from=2024-05-01", "test_from=2024-06-01"]
    split = load_recipe(Recipe, path, words).split
    assert (split.by, split.validation_from, split.test_from) == (
        "time",
        "2024-05-01",
        "2024-06-01",
    )
    assert load_recipe(Recipe, path, ["split.validation=3"]).split.validation == 3
    with pytest.raises(SlipstreamError, match="needs shares of the users"):
        load_recipe(Recipe, path, ["split.by=users"])
    with pytest.raises(SlipstreamError, match=r"unknown key .split\.bye."):
        load_recipe(Recipe, path, ["split.bye=users"])
