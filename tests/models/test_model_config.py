"""A config fills in what is left out, and refuses what is wrong with a sentence."""

import pytest
from pydantic import ValidationError

from slipstream.models.model_config import ModelConfig


def test_a_dumped_config_holds_everything_and_loads_the_same():
    for config in (
        ModelConfig(),
        ModelConfig(kind="sasrec", size="small"),
        ModelConfig(kind="fuxi", heads=4, dv=7),
        ModelConfig(kind="fuxi", time_encoding="functional", time_buckets=0),
    ):
        assert ModelConfig(**config.model_dump()) == config
        assert config.dqk > 0 and config.dv > 0


def test_a_dump_names_the_time_encoding_only_where_it_is_not_the_earlier_one():
    """Digests of recipes and versions of bundles from before it existed stay as they are."""
    assert "time_encoding" not in ModelConfig().model_dump(mode="json")
    functional = ModelConfig(kind="fuxi", time_encoding="functional")
    assert functional.model_dump(mode="json")["time_encoding"] == "functional"


def test_defaults_by_kind():
    assert (ModelConfig().time_bias, ModelConfig().position_bias) == ("own", True)
    sasrec = ModelConfig(kind="sasrec")
    assert (sasrec.time_bias, sasrec.position_bias, sasrec.position_embedding) == (
        "none",
        False,
        True,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dim": 50, "heads": 4}, "dim 50 cannot be shared by 4 heads"),
        ({"kind": "sasrec", "time_bias": "own"}, "sasrec has no relative bias"),
        ({"time_buckets": 0}, "a time bias needs buckets"),
        ({"kind": "sasrec", "time_encoding": "functional"}, "set time_bias to own or next"),
        ({"kind": "fuxi", "time_encoding": "functional", "time_bias": "none"}, "or leave time_enc"),
        ({"time_encoding": "sines"}, "'buckets' or 'functional'"),
        ({"kind": "transformer"}, "'hstu', 'fuxi' or 'sasrec'"),
        ({"size": "huge"}, "'tiny', 'small', 'medium', 'large' or 'long'"),
        ({"blokcs": 2}, "Extra inputs are not permitted"),
        ({"dropout": 1.0}, "less than 1"),
        ({"dim": 0}, "greater than or equal to 1"),
        ({"divisor": 0.0}, "greater than 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_sentence(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ModelConfig(**settings)
