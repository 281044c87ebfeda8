"""A wrong argument is one clear exception, for named cases and random ones; borders of buckets."""

import math
import random

import pytest
import torch

from slipstream.ops import native
from slipstream.ops.attention import (
    RelativeBias,
    fuxi_attention,
    hstu_attention,
    time_bucket_borders,
)
from slipstream.ops.attention_reference import bucket_of

ODD = (-1, 0, 1, 2, 7, 2**62, -(2**63), 2**63 - 1)


def good() -> dict:
    return {
        "q_THK": torch.ones(6, 2, 3),
        "k_SHK": torch.ones(6, 2, 3),
        "v_SHV": torch.ones(6, 2, 4),
        "q_offsets_B1": torch.tensor([0, 2, 6]),
        "k_offsets_B1": torch.tensor([0, 2, 6]),
        "divisor": 2.0,
        "scale": 1.0,
        "bias": RelativeBias(torch.ones(5), torch.ones(4)),
        "timestamps_T": torch.arange(6),
        "k_timestamps_S": torch.arange(6),
        "num_candidates_B": torch.tensor([0, 1]),
        "window": 3,
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q_THK", torch.ones(6, 6), ValueError, "3 dimensions"),
        ("q_THK", [1.0], TypeError, "must be a tensor"),
        ("q_THK", torch.ones(6, 2, 3, dtype=torch.int64), TypeError, "floating point"),
        ("k_SHK", torch.ones(6, 2, 3, dtype=torch.float64), TypeError, "same dtype"),
        ("k_SHK", torch.ones(6, 2, 3, device="meta"), TypeError, "one device"),
        ("k_SHK", torch.ones(6, 2, 5), ValueError, "agree"),
        ("v_SHV", torch.ones(5, 2, 4), ValueError, "agree"),
        ("v_SHV", torch.ones(6, 2, 0), ValueError, "above 0"),
        ("q_offsets_B1", torch.tensor([0, 7, 6]), ValueError, "never decrease"),
        ("q_offsets_B1", torch.tensor([0, 2, 9]), ValueError, "run from 0 to 6"),
        ("q_offsets_B1", torch.tensor([0, 2, 6], dtype=torch.int32), TypeError, "torch.int64"),
        ("q_offsets_B1", torch.tensor([], dtype=torch.int64), ValueError, "one entry more"),
        ("k_offsets_B1", torch.tensor([0, 1, 6]), ValueError, "tail of the keys"),
        ("k_offsets_B1", torch.tensor([0, 6]), ValueError, "one length"),
        ("divisor", 0, ValueError, "above 0"),
        ("divisor", "2", TypeError, "number"),
        ("scale", float("nan"), ValueError, "finite"),
        ("bias", torch.ones(5), TypeError, "RelativeBias"),
        ("bias", RelativeBias(torch.ones(4)), ValueError, "odd"),
        ("bias", RelativeBias(None, torch.ones(4000)), ValueError, "time table"),
        ("bias", RelativeBias(decay_3=torch.ones(2)), ValueError, "a, b and c"),
        ("bias", RelativeBias(None, torch.ones(4), torch.ones(3)), ValueError, "give one of them"),
        ("bias", RelativeBias(decay_3=torch.ones(3).double()), TypeError, "same dtype"),
        ("timestamps_T", torch.arange(5), ValueError, "one entry per token"),
        ("timestamps_T", torch.arange(6) + 2**62, ValueError, "2\\^62"),
        ("timestamps_T", None, ValueError, "required with a time bias"),
        ("num_candidates_B", torch.tensor([3, 0]), ValueError, "between 0 and the number of keys"),
        ("num_candidates_B", torch.tensor([0]), ValueError, "one entry per sequence"),
        ("window", 0, ValueError, "at least 1"),
        ("window", 1.5, ValueError, "whole number"),
        ("backend", "nativ", ValueError, "did you mean 'native'"),
    ],
)
@pytest.mark.parametrize("operator", [hstu_attention, fuxi_attention])
def test_a_wrong_argument_is_one_clear_exception(operator, name, value, error, message):
    with pytest.raises(error, match=message):
        operator(**good() | {name: value})


def test_more_keys_than_queries_need_their_own_offsets_and_times():
    more = good() | {"k_SHK": torch.ones(8, 2, 3), "v_SHV": torch.ones(8, 2, 4)}
    with pytest.raises(ValueError, match="k_offsets_B1 is required"):
        hstu_attention(**more | {"k_offsets_B1": None})
    with pytest.raises(ValueError, match="k_timestamps_S is required"):
        hstu_attention(**more | {"k_offsets_B1": torch.tensor([0, 3, 8]), "k_timestamps_S": None})


def spoil_integers(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    tensor = tensor.clone()
    if tensor.numel() and rng.random() < 0.8:
        tensor[rng.randrange(tensor.numel())] = rng.choice(ODD)
    if rng.random() < 0.3:
        tensor = (
            tensor[: rng.randrange(tensor.numel() + 1)]
            if rng.random() < 0.5
            else torch.cat([tensor, tensor])
        )
    if rng.random() < 0.1:
        tensor = tensor.to(rng.choice([torch.int32, torch.float32, torch.bool]))
    return tensor


def spoil_floats(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    shape = [max(0, n + rng.choice([-1, 0, 0, 0, 1])) for n in tensor.shape]
    if rng.random() < 0.1:
        shape = shape[:-1]
    return torch.ones(
        shape, dtype=rng.choice([torch.float32] * 6 + [torch.float64, torch.float16, torch.int64])
    )


def spoilt(rng: random.Random) -> dict:
    arguments = good()
    for name in rng.sample(sorted(arguments), rng.randint(1, 3)):
        value = arguments[name]
        if rng.random() < 0.05:
            arguments[name] = rng.choice([None, "x", 3, (), torch.ones(0)])
        elif isinstance(value, torch.Tensor):
            arguments[name] = (
                spoil_floats(value, rng)
                if value.is_floating_point()
                else spoil_integers(value, rng)
            )
        elif name == "bias":
            tables = [spoil_floats(torch.ones(n), rng) for n in (5, 4, 3)]
            tables[rng.choice((1, 2))] = None  # one of the two kinds of time bias
            arguments[name] = RelativeBias(
                *(table if rng.random() < 0.8 else None for table in tables)
            )
        else:
            arguments[name] = rng.choice([*ODD, 0.5, -1.0, float("inf"), True])
    return arguments


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_wrong_arguments_give_a_result_or_an_exception_with_a_sentence(calls):
    rng, passed = random.Random(0), 0
    backend = "native" if native.available() else "reference"
    for attempt in range(calls):
        arguments = spoilt(rng)
        operator = rng.choice([hstu_attention, fuxi_attention])
        try:
            out = operator(**arguments, backend=backend if attempt % 2 else None)
            assert out.shape[0] == arguments["q_THK"].shape[0]
            passed += 1
        except (ValueError, TypeError, IndexError) as error:
            assert len(str(error)) > 15, error
    assert 0.03 * calls < passed < 0.7 * calls


def test_borders_are_the_formula_rounded_once():
    borders = time_bucket_borders(145)
    assert borders.dtype == torch.int64 and borders.tolist()[:6] == [0, 2, 2, 3, 4, 5]
    for dt in [0, 1, 2, 3, 10, 60, 3600, 86_400, 31_536_000, 2**40, 2**61 + 1]:
        assert int(bucket_of(torch.tensor(-dt), borders)) == math.floor(
            math.log(max(dt, 1)) / 0.301
        )
    for bucket in range(3, 60):
        edge = int(borders[bucket])
        assert bucket_of(torch.tensor([edge - 1, edge]), borders).tolist() == [bucket - 1, bucket]


def test_few_buckets_keep_the_far_past_together():
    assert bucket_of(torch.tensor([0, 1, 2, 10**15]), time_bucket_borders(2)).tolist() == [
        0,
        0,
        2,
        2,
    ]
    assert bucket_of(torch.tensor([0, 10**15]), time_bucket_borders(0)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="time table"):
        time_bucket_borders(-1)
