"""Recipes: overrides land where they should, and every mistake is one helpful sentence."""

from typing import ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from slipstream.config import flatten, load_recipe
from slipstream.errors import SlipstreamError


class Loss(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: str = "sampled"
    negatives: int = 128


class Train(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_steps: int | None = None
    lr: float = 1e-3
    schedule: str = "synchronous"


class Tables(BaseModel):
    model_config = ConfigDict(extra="forbid")
    renamed: ClassVar[dict[str, str]] = {"speed": "lr"}
    lr: float = 1e-2


class Tiny(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    tasks: dict[str, float] = {}
    loss: Loss = Loss()
    train: Train = Train()
    tables: Tables = Tables()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\nloss: {negatives: 4}\n")
    return path


def test_overrides_reach_their_keys(recipe):
    overrides = ["max_steps=2_000", "loss=full", "tables.lr=1e-4", "tasks.click=0.5"]
    loaded = load_recipe(Tiny, recipe, overrides, train__lr=0.5)
    assert (loaded.train.max_steps, loaded.loss.kind, loaded.loss.negatives) == (2000, "full", 4)
    assert (loaded.tables.lr, loaded.train.lr, loaded.tasks) == (1e-4, 0.5, {"click": 0.5})


def test_a_mapping_for_a_section_is_merged_into_it(recipe):
    loaded = load_recipe(Tiny, recipe, ["train={lr: 0.25}"], loss={"kind": "full"})
    assert (loaded.loss.kind, loaded.loss.negatives, loaded.train.lr) == ("full", 4, 0.25)
    with pytest.raises(SlipstreamError, match=r"unknown key 'loss.kid'.*did you mean 'loss.kind'"):
        load_recipe(Tiny, recipe, loss={"kid": "full"})


def test_a_section_with_nothing_below_it_has_its_defaults(tmp_path):
    path = tmp_path / "open.yaml"
    path.write_text("name: open\nloss:\n")
    assert load_recipe(Tiny, path).loss == Loss()
    assert load_recipe(Tiny, path, ["negatives=3"]).loss == Loss(negatives=3)


def test_nested_mappings_flatten_to_full_keys():
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {}}) == {
        "a": 1,
        "b.c": 2,
        "b.d.e": 3,
        "f": {},
    }


@pytest.mark.parametrize("override", ["speed=0.5", "tables.speed=0.5", "tables.lr=0.5"])
def test_a_key_that_was_renamed_is_still_found(tmp_path, override):
    path = tmp_path / "old.yaml"
    path.write_text("name: old\ntables: {speed: 0.25}\n")
    assert load_recipe(Tiny, path).tables.lr == 0.25
    assert load_recipe(Tiny, path, [override]).tables.lr == 0.5


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["shedule=nested"], r"unknown key 'shedule' in .* overrides; did you mean 'schedule'\?"),
        (["train.max_step=3"], r"unknown key 'train.max_step' .*did you mean 'train.max_steps'\?"),
        (["lr=1"], r"key 'lr' .* is ambiguous: write train.lr or tables.lr"),
        (["max_steps=soon"], r"^train.max_steps in .* must be a whole number, got 'soon'$"),
        (["loss={negative: 3}"], r"unknown key 'loss.negative' .*did you mean 'loss.negatives'\?"),
        (["max_steps"], r"not of the form key=value"),
        (["max_steps=[1"], r"not a valid value"),
    ],
)
def test_a_wrong_override_is_one_sentence(recipe, overrides, sentence):
    with pytest.raises(SlipstreamError, match=sentence) as caught:
        load_recipe(Tiny, recipe, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: x\nlos: {}\n", r"unknown key 'los' .*did you mean 'loss'\?"),
        ("loss: {}\n", r"^name in .* is missing; it must be text$"),
        ("- 1\n", "must be a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SlipstreamError, match=sentence):
        load_recipe(Tiny, path)


def test_an_unknown_recipe_says_so():
    with pytest.raises(SlipstreamError, match=r"there is no recipe 'recipes/nope\.yaml'"):
        load_recipe(Tiny, "recipes/nope.yaml")
