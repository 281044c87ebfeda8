"""Pointwise operators: native equals the fp64 reference, masks bit for bit, wrong ones refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops import pointwise, pointwise_reference
from tests.support.operator_parity import assert_parity, needs_native, results, threads

TOKENS = st.sampled_from([0, 1, 2, 7, 33, 700])
WIDTHS = st.sampled_from([1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 50, 64, 129])
SEEDS = st.integers(0, 2**31)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def names(seed: int, tokens: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (tokens,), generator=torch.Generator().manual_seed(seed))


@needs_native
@settings(max_examples=40, deadline=None)
@given(tokens=TOKENS, width=WIDTHS, out=WIDTHS, seed=SEEDS, bias=st.booleans())
def test_linear_silu_native_equals_reference(tokens, width, out, seed, bias):
    inputs = [randn(seed, tokens, width), randn(seed + 1, out, width)] + (
        [randn(seed + 2, out)] if bias else []
    )
    assert_parity(pointwise.linear_silu, *inputs)


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 5, 12, 13, 96, 97, 250]),
    depth=st.sampled_from([1, 7, 16, 50, 64, 257]),
    widths=st.lists(st.sampled_from([0, 1, 3, 16, 50, 64]), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_parts_of_a_projection_equal_the_reference(tokens, depth, widths, seed):
    x_TD, weight_FD = randn(seed, tokens, depth), randn(seed + 1, sum(widths), depth)

    def joined(*inputs, backend):
        parts = pointwise.linear_silu_parts(*inputs, widths, backend=backend)
        assert all(part.is_contiguous() for part in parts)
        return torch.cat(parts, dim=1)

    assert_parity(joined, x_TD, weight_FD)


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 13, 200]),
    depth=st.sampled_from([1, 50, 64, 256]),
    width=st.sampled_from([1, 17, 50, 128]),
    bias=st.booleans(),
)
def test_linear_native_equals_reference(tokens, depth, width, bias):
    inputs = [randn(1, tokens, depth), randn(2, width, depth)] + ([randn(3, width)] * bias)
    assert_parity(pointwise.linear, *inputs)


@needs_native
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it():
    x_TD, weight_FD = randn(1, 40, 50), randn(2, 120, 50)
    with torch.no_grad():
        whole = pointwise.linear_silu(x_TD, weight_FD, backend="native")
        for part in (slice(0, 1), slice(3, 20), slice(39, 40)):
            alone = pointwise.linear_silu(x_TD[part], weight_FD, backend="native")
            assert torch.equal(whole[part], alone)


def test_parts_that_do_not_cut_the_width_are_refused():
    with pytest.raises(ValueError, match="do not cut a width of 5"):
        pointwise.linear_silu_parts(torch.ones(2, 3), torch.ones(5, 3), [2, 2])


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    tokens=TOKENS,
    width=WIDTHS,
    seed=SEEDS,
    weight=st.booleans(),
    norm=st.sampled_from(["layer", "rms"]),
    p=st.sampled_from([0.0, 0.2, 0.9]),
)
def test_norm_gate_dropout_native_equals_reference(tokens, width, seed, weight, norm, p):
    ids_T = names(seed, tokens)

    def operator(x_TF, gate_TF, weight_F=None, *, backend):
        return pointwise.norm_gate_dropout(
            x_TF,
            gate_TF,
            norm=norm,
            eps=1e-3,
            p=p,
            seed=seed,
            token_ids_T=ids_T,
            weight_F=weight_F,
            backend=backend,
        )

    inputs = [randn(seed, tokens, width), randn(seed + 1, tokens, width)] + (
        [randn(seed + 2, width)] if weight else []
    )
    assert_parity(
        operator, *inputs, floor=1.0
    )  # a norm over few columns is nearly constant: its gradient is a difference of ones


@needs_native
@settings(max_examples=40, deadline=None)
@given(tokens=TOKENS, width=WIDTHS, seed=SEEDS, weight=st.booleans())
def test_rms_norm_native_equals_reference(tokens, width, seed, weight):
    x_TD, weights = randn(seed, tokens, width), [randn(seed + 1, width)] if weight else []
    floor = 1.0
    if width == 1 and tokens:  # the gradient's two terms, of the size 1 / |x|, cancel
        floor = max(floor, float((x_TD.square() + 1e-6).rsqrt().max()))
    assert_parity(pointwise.rms_norm, x_TD, *weights, floor=floor)


@needs_native
@settings(max_examples=40, deadline=None)
@given(tokens=TOKENS, width=WIDTHS, seed=SEEDS, p=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.999]))
def test_dropout_native_equals_reference_bit_for_bit(tokens, width, seed, p):
    x_TD, ids_T = randn(seed, tokens, width), names(seed, tokens)
    for count in (1, 2):
        with threads(count):
            one = results(
                lambda x: pointwise.dropout(x, p=p, seed=seed, token_ids_T=ids_T, backend="native"),
                x_TD,
            )
        other = results(
            lambda x: pointwise.dropout(x, p=p, seed=seed, token_ids_T=ids_T, backend="reference"),
            x_TD,
        )
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_native
def test_native_masks_are_the_named_ones_at_a_large_size():
    ones_TD, ids_T = torch.ones(3000, 129), names(5, 3000)
    for p in (0.2, 0.3, 0.7, 0.1 + 0.2):
        kept = (
            pointwise.dropout(ones_TD, p=p, seed=2**63 - 1, token_ids_T=ids_T, backend="native")
            != 0
        )
        assert torch.equal(kept, pointwise_reference.keep_mask(2**63 - 1, ids_T, 129, p))


@needs_native
def test_extreme_values_stay_finite_or_nan_as_they_should():
    x_TD = torch.tensor([[-1e4, -88.5, -87.5, -20.0, 0.0, 20.0, 88.0, 1e4, 3.0]])
    eye = torch.eye(9)
    assert_parity(pointwise.linear_silu, x_TD, eye)
    x_TD[0, 3] = float("nan")
    assert torch.isnan(pointwise.linear_silu(x_TD, eye, backend="native")).all()


WRONG = [
    (TypeError, lambda x, i: pointwise.linear_silu(x.long(), x)),
    (TypeError, lambda x, i: pointwise.linear_silu(x, x.double())),
    (TypeError, lambda x, i: pointwise.linear_silu([1.0], x)),
    (ValueError, lambda x, i: pointwise.linear_silu(x, x[:, :3])),
    (ValueError, lambda x, i: pointwise.linear_silu(x, x, x)),
    (ValueError, lambda x, i: pointwise.linear_silu(x[0], x)),
    (ValueError, lambda x, i: pointwise.linear_silu(x, x.to("meta"))),
    (ValueError, lambda x, i: pointwise.rms_norm(x, x[0, :3])),
    (ValueError, lambda x, i: pointwise.rms_norm(x, eps=-1.0)),
    (ValueError, lambda x, i: pointwise.layer_norm(x, eps=float("nan"))),
    (ValueError, lambda x, i: pointwise.norm_gate_dropout(x, x[1:])),
    (ValueError, lambda x, i: pointwise.norm_gate_dropout(x, x, norm="batch")),
    (ValueError, lambda x, i: pointwise.norm_gate_dropout(x, x, p=0.5, seed=1)),
    (ValueError, lambda x, i: pointwise.norm_gate_dropout(x, x, p=1.0, seed=1, token_ids_T=i)),
    (ValueError, lambda x, i: pointwise.dropout(x, p=-0.1, seed=1, token_ids_T=i)),
    (ValueError, lambda x, i: pointwise.dropout(x, p=0.1, seed=1 << 64, token_ids_T=i)),
    (ValueError, lambda x, i: pointwise.dropout(x, p=0.1, seed=1, token_ids_T=i[1:])),
    (TypeError, lambda x, i: pointwise.dropout(x, p=0.1, seed=1, token_ids_T=i.int())),
    (
        ValueError,
        lambda x, i: pointwise.dropout(x.double(), p=0.1, seed=1, token_ids_T=i, backend="native"),
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_operands_are_refused(number):
    error, call = WRONG[number]
    with pytest.raises(error, match=r"\w+ \w+"):
        call(torch.ones(4, 5), torch.arange(4))


def test_without_gradients_the_values_are_the_same():
    torch.manual_seed(0)
    x_TD, weight_FD, gate_TF = (
        torch.randn(9, 16),
        torch.randn(24, 16, requires_grad=True),
        torch.randn(9, 24),
    )
    recorded = pointwise.norm_gate_dropout(pointwise.linear_silu(x_TD, weight_FD), gate_TF)
    assert recorded.requires_grad
    with torch.no_grad():
        plain = pointwise.norm_gate_dropout(pointwise.linear_silu(x_TD, weight_FD), gate_TF)
    with torch.inference_mode():
        served = pointwise.norm_gate_dropout(pointwise.linear_silu(x_TD, weight_FD), gate_TF)
    assert (
        not plain.requires_grad and torch.equal(plain, recorded) and torch.equal(served, recorded)
    )
