"""A wrong value of a recipe is one sentence of ours: the key, what it must be, what it is."""

import pytest

from slipstream.config import load_recipe
from slipstream.config_words import describe_field
from slipstream.errors import SlipstreamError
from slipstream.training.recipe import Recipe

A_FRACTION = "a number of at least 0 and below 1"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "dim=abc",
            "model.dim in F must be a whole number of at least 1 and at most 16384, got 'abc'",
        ),
        (
            "dim=1.5",
            "model.dim in F must be a whole number of at least 1 and at most 16384, got 1.5",
        ),
        ("model.kind=hst", "model.kind in F must be hstu, fuxi or sasrec, got 'hst'"),
        ("model=[1]", "model.kind in F must be hstu, fuxi or sasrec, got [1]"),
        ("model.dropout=1", f"model.dropout in F must be {A_FRACTION}, got 1"),
        ("optimizer.lr=0", "optimizer.lr in F must be a number above 0, got 0"),
        ("clip_norm=-2", "optimizer.clip_norm in F must be a number above 0, got -2"),
        (
            "optimizer.betas=[2, 2]",
            f"optimizer.betas in F must be a list of 2 values, each {A_FRACTION}, got 2",
        ),
        ("item_features=x", "item_features in F must be a list of values, each text, got 'x'"),
        ("loss.normalize=maybe", "loss.normalize in F must be true or false, got 'maybe'"),
        (
            "micro_batches=none",
            "train.micro_batches in F must be a whole number of at least 1 and at most 4096 or "
            "auto, got 'none'",
        ),
        ("name=3", "name in F must be text, got 3"),
        ("tasks=3", "tasks in F must be a mapping of names to settings, got 3"),
        ("tasks.click={}", "tasks.click.column in F is missing; it must be text"),
        ("split.test=x", "split.test in F must be a number, got 'x'"),
        ("split=3", "split in F must be a mapping of keys to values, got 3"),
        ("task=ranking", "the recipe in F: task 'ranking' needs tasks: name at least one action"),
        ("mesh=2by2", "train.mesh in F cannot be '2by2'; it is replicas x shards of the ranks"),
        ("split={tset: 1}", "split in F: unknown key 'tset' in split; did you mean 'test'?"),
    ],
)
def test_a_wrong_value_says_what_it_must_be(override, sentence):
    with pytest.raises(SlipstreamError) as caught:
        load_recipe(Recipe, "ml-1m-hstu", [override])
    assert str(caught.value).startswith(sentence.replace(" F", " ml-1m-hstu"))
    assert "\n" not in str(caught.value)


def test_a_long_wrong_value_is_not_repeated_in_full():
    with pytest.raises(SlipstreamError) as caught:
        load_recipe(Recipe, "ml-1m-hstu", seed="9" * 1000)
    assert len(str(caught.value)) < 250


def test_every_key_of_a_recipe_has_words_for_what_it_takes():
    fields = [Recipe.model_fields["seed"]]
    for section in Recipe.model_fields.values():
        fields += getattr(section.annotation, "model_fields", {}).values()
    assert len(fields) > 70
    words = [describe_field(field) for field in fields]
    assert words[0] == "a whole number of at least 0 and below 9223372036854775808"
    assert not [text for text in words if not text or "mapping of keys" in text or "typing" in text]
