"""Row operators: native equals reference, sums are deterministic, other rows stay as they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops import rows, rows_native
from tests.support.operator_parity import assert_close, assert_parity, needs_native, threads

COUNTS = st.sampled_from([0, 1, 2, 63, 64, 1500])
WIDTHS = st.sampled_from([1, 3, 7, 8, 9, 16, 17, 50, 64])
SEEDS = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    count=COUNTS,
    seed=SEEDS,
    span=st.sampled_from([1, 5, 1000, 1 << 17, 1 << 40, (1 << 63) - 1]),
    low=st.sampled_from([0, 7, -(1 << 62)]),
)
def test_unique_keys_equal_torch_unique(count, seed, span, low):
    high = min(low + span, (1 << 63) - 1)
    keys_T = torch.randint(low, high, (count,), generator=generator(seed))
    if count > 2:
        keys_T[: count // 3] = keys_T[count // 2]
    for count_of_threads in (1, 2):
        with threads(count_of_threads):
            unique_U, inverse_T = rows.unique_keys(keys_T)
        expected_U, expected_T = torch.unique(keys_T, return_inverse=True)
        assert torch.equal(unique_U, expected_U) and torch.equal(inverse_T, expected_T)


@needs_native
@pytest.mark.parametrize("bits", [17, 18, 24, 33, 62])
def test_unique_keys_of_many_keys_are_sorted_in_parts(bits):
    """More keys than fit the cache are split into parts first, one of them filled by one key."""
    count = 40_000
    keys_T = torch.randint(-(1 << bits), 1 << bits, (count,), generator=generator(bits))
    keys_T[:: 3 if bits % 2 else 1000] = keys_T[5]
    for count_of_threads in (1, 2):
        with threads(count_of_threads):
            unique_U, inverse_T = rows.unique_keys(keys_T, backend="native")
        expected_U, expected_T = rows.unique_keys(keys_T, backend="reference")
        assert torch.equal(unique_U, expected_U) and torch.equal(inverse_T, expected_T)


@needs_native
def test_many_token_gradients_of_one_row_are_summed_in_a_fixed_order():
    grads_TD = torch.randn(40_000, 5, generator=generator(4))
    rows_T = torch.randint(9, (40_000,), generator=generator(5))
    expected_UD = rows.coalesce(grads_TD.double(), rows_T, 9)
    for count in (1, 2):
        with threads(count):
            found_UD = rows.coalesce(grads_TD, rows_T, 9, backend="native")
            assert torch.equal(found_UD, rows.coalesce(grads_TD, rows_T, 9, backend="native"))
        assert_close(found_UD, expected_UD, tolerance=1e-4)  # a plain fp32 sum of 4,000 gradients


def test_unique_keys_at_the_ends_of_int64():
    keys_T = torch.tensor([2**63 - 1, -(2**63), 0, 2**63 - 1, -1])
    unique_U, inverse_T = rows.unique_keys(keys_T)
    assert unique_U.tolist() == [-(2**63), -1, 0, 2**63 - 1] and inverse_T.tolist() == [
        3,
        0,
        2,
        3,
        1,
    ]


@needs_native
@settings(max_examples=30, deadline=None)
@given(count=COUNTS, num_rows=st.sampled_from([1, 5, 257, 9001]), width=WIDTHS, seed=SEEDS)
def test_take_rows_native_equals_reference(count, num_rows, width, seed):
    index_T = torch.randint(num_rows, (count,), generator=generator(seed))
    rows_UD = torch.randn(num_rows, width, generator=generator(seed))
    assert_parity(lambda x, backend: rows.take_rows(x, index_T, backend=backend), rows_UD)


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([1, 5, 200]),
    per_token=st.sampled_from([1, 3, 17]),
    width=WIDTHS,
    seed=SEEDS,
    weighted=st.booleans(),
)
def test_both_ways_of_scattering_equal_index_add(tokens, per_token, width, seed, weighted):
    num_rows = 211
    source_TD = torch.randn(tokens, width, generator=generator(seed))
    index_TR = torch.randint(num_rows, (tokens, per_token), generator=generator(seed))
    weights_TR = torch.randn(tokens, per_token, generator=generator(seed)) if weighted else None
    factors = (torch.ones(tokens, per_token) if weights_TR is None else weights_TR).double()
    spread = (factors.unsqueeze(2) * source_TD.double().unsqueeze(1)).reshape(-1, width)
    expected_UD = torch.zeros(num_rows, width, dtype=torch.float64).index_add_(
        0, index_TR.flatten(), spread
    )
    summed = []
    for count in (1, 2):
        with threads(count):
            assert_close(
                rows_native.scatter_rows(source_TD, index_TR, weights_TR, num_rows),
                expected_UD,
                "copies",
            )
            into_UD = torch.zeros(num_rows, width)
            summed.append(
                rows_native.scatter_rows(source_TD, index_TR, weights_TR, num_rows, into_UD=into_UD)
            )
            assert_close(summed[-1], expected_UD, "buckets")
    assert torch.equal(*summed), "sums by buckets must not depend on the number of threads"


@needs_native
def test_scattering_goes_on_over_the_limit_of_entries(monkeypatch):
    monkeypatch.setattr(rows_native, "_MAX_ENTRIES", 10)
    monkeypatch.setattr(rows_native, "_MAX_BUCKETS", 3)
    source_TD, index_TR = (
        torch.randn(40, 9, generator=generator(1)),
        torch.randint(50, (40, 3), generator=generator(2)),
    )
    found_UD = rows_native.scatter_rows(source_TD, index_TR, None, 50, into_UD=torch.ones(50, 9))
    expected_UD = (
        torch.ones(50, 9)
        .double()
        .index_add_(0, index_TR.flatten(), source_TD.double().repeat_interleave(3, 0))
    )
    assert_close(found_UD, expected_UD)


def tables(num_rows: int, width: int, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = generator(seed)
    return {
        "weights": torch.randn(num_rows, width, generator=g).to(dtype),
        "m": torch.randn(num_rows, width, generator=g).to(dtype),
        "v": torch.rand(num_rows, generator=g).to(dtype),
        "steps": torch.randint(0, 50, (num_rows,), generator=g),
    }


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    count=COUNTS,
    width=WIDTHS,
    seed=SEEDS,
    kind=st.sampled_from(["adagrad", "adam"]),
)
def test_optimisers_native_equal_reference(count, width, seed, kind):
    num_rows = 2000
    draw = torch.randperm(num_rows, generator=generator(seed))[:count]
    grads = torch.randn(count, width, generator=generator(seed + 1))

    def step(table: dict[str, torch.Tensor], backend: str) -> None:
        g = grads.to(table["weights"].dtype)
        options = {"lr": 0.1, "eps": 1e-8, "backend": backend}
        if kind == "adagrad":
            rows.rowwise_adagrad_(table["weights"], table["v"], draw, g, **options)
        else:
            rows.rowwise_adam_(*table.values(), draw, g, betas=(0.9, 0.999), **options)

    expected, before = (
        tables(num_rows, width, seed, torch.float64),
        tables(num_rows, width, seed, torch.float32),
    )
    step(expected, "reference")
    seen = []
    for thread_count in (1, 2):
        with threads(thread_count):
            found = tables(num_rows, width, seed, torch.float32)
            step(found, "native")
        assert torch.equal(found["steps"], expected["steps"])
        for name in ("weights", "m", "v"):
            assert_close(found[name], expected[name], name)
        untouched = torch.ones(num_rows, dtype=torch.bool).index_fill_(0, draw, False)
        assert all(torch.equal(found[name][untouched], before[name][untouched]) for name in found)
        seen.append(found)
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in found)


def test_a_table_with_gaps_is_updated_in_place_too():
    wide = torch.zeros(4, 6)
    rows.rowwise_adagrad_(
        wide[:, :3], torch.zeros(4), torch.tensor([2]), torch.ones(1, 3), lr=1.0, eps=0.0
    )
    assert wide[2].tolist() == [-1.0, -1.0, -1.0, 0.0, 0.0, 0.0] and wide.sum() == -3


FIVE, THREE, GRADS = torch.ones(5, 3), torch.tensor([0, 1, 4]), torch.ones(3, 3)
ADAM = (FIVE, FIVE.clone(), torch.ones(5))


def adagrad(state=FIVE[:, 0], rows_U=THREE, grads=GRADS):
    rows.rowwise_adagrad_(FIVE, state, rows_U, grads, lr=1, eps=0)


def adam(steps, betas):
    rows.rowwise_adam_(*ADAM, steps, THREE, GRADS, lr=1, betas=betas, eps=0)


WRONG = [
    (TypeError, lambda: rows.unique_keys(FIVE[0])),
    (TypeError, lambda: rows.unique_keys(THREE.int())),
    (ValueError, lambda: rows.unique_keys(THREE.view(1, 3))),
    (IndexError, lambda: rows.take_rows(FIVE, torch.tensor([5]))),
    (IndexError, lambda: rows.take_rows(FIVE, torch.tensor([-1]))),
    (IndexError, lambda: rows.take_rows(FIVE[:0], torch.tensor([0]))),
    (IndexError, lambda: rows.take_rows(FIVE, torch.tensor([2**63 - 1]))),
    (TypeError, lambda: rows.take_rows(FIVE, THREE.float())),
    (TypeError, lambda: rows.take_rows(FIVE.long(), THREE)),
    (ValueError, lambda: rows.take_rows(FIVE[0], THREE)),
    (TypeError, lambda: rows.take_rows(FIVE.to_sparse(), THREE)),
    (TypeError, lambda: rows.take_rows(FIVE, [0, 1])),
    (IndexError, lambda: rows.coalesce(FIVE, torch.tensor([0, 1, 2, 3, 4]), 4)),
    (ValueError, lambda: rows.coalesce(FIVE, THREE, 5)),
    (ValueError, lambda: rows.coalesce(FIVE, THREE, -1)),
    (ValueError, lambda: adagrad(state=torch.ones(4))),
    (ValueError, lambda: adagrad(grads=torch.ones(3, 2))),
    (ValueError, lambda: adagrad(rows_U=torch.tensor([1, 0, 1]))),
    (TypeError, lambda: adagrad(state=torch.ones(5).double())),
    (IndexError, lambda: adagrad(rows_U=THREE + 1)),
    (TypeError, lambda: adam(FIVE[:, 0], (0.9, 0.9))),
    (ValueError, lambda: adam(torch.arange(5), (0.9, 1.0))),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_operands_are_refused(number):
    error, call = WRONG[number]
    with pytest.raises(error, match=r"\w+ \w+"):
        call()
