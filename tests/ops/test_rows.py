"""Row operators: native equals reference, sums are deterministic, rows untouched stay untouched,
wrong operands are refused.
"""

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
    """Beyond what fits the cache keys are dealt into parts first, also when one key fills most of a
    part.
    """
    count = 40_000
    keys_T = torch.randint(-(1 << bits), 1 << bits, (count,), generator=generator(bits))
    keys_T[:: 3 if bits % 2 else 1000] = keys_T[5]
    for count_of_threads in (1, 2):
        with threads(count_of_threads):
            unique_U, inverse_T = rows.unique_keys(keys_T, backend="native")
        expected_U, expected_T = rows.unique_keys(keys_T, backend="reference")
        assert torch.equal(unique_U, expected_U) and torch.equal(inverse_T, expected_T)


@needs_native
def test_many_token_gradients_of_one_row_are_summed_in_token_order():
    grads_TD, rows_T = (
        torch.randn(40_000, 5, generator=generator(4)),
        torch.randint(9, (40_000,), generator=generator(5)),
    )
    judge = [torch.zeros(9, 5, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)]
    rows.rowwise_adagrad_from_tokens_(*judge, rows_T, grads_TD.double(), lr=0.1, eps=1e-8)
    seen = []
    for count in (1, 2):
        with threads(count):
            seen.append([torch.zeros(9, 5), torch.zeros(9)])
            rows.rowwise_adagrad_from_tokens_(
                *seen[-1], rows_T, grads_TD, lr=0.1, eps=1e-8, backend="native"
            )
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])
    assert_close(seen[0][0], judge[0], tolerance=1e-4)  # a plain fp32 sum of 4,000 gradients


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
    judge_UD = torch.zeros(num_rows, width, dtype=torch.float64).index_add_(
        0, index_TR.flatten(), spread
    )
    dealt = []
    for count in (1, 2):
        with threads(count):
            assert_close(
                rows_native.scatter_rows(source_TD, index_TR, weights_TR, num_rows),
                judge_UD,
                "copies",
            )
            into_UD = torch.zeros(num_rows, width)
            dealt.append(
                rows_native.scatter_rows(source_TD, index_TR, weights_TR, num_rows, into_UD=into_UD)
            )
            assert_close(dealt[-1], judge_UD, "buckets")
    assert torch.equal(*dealt), "dealing into buckets must not depend on the number of threads"


@needs_native
def test_scattering_goes_on_over_the_limit_of_entries(monkeypatch):
    monkeypatch.setattr(rows_native, "_MAX_ENTRIES", 10)
    monkeypatch.setattr(rows_native, "_MAX_BUCKETS", 3)
    source_TD, index_TR = (
        torch.randn(40, 9, generator=generator(1)),
        torch.randint(50, (40, 3), generator=generator(2)),
    )
    found_UD = rows_native.scatter_rows(source_TD, index_TR, None, 50, into_UD=torch.ones(50, 9))
    judge_UD = (
        torch.ones(50, 9)
        .double()
        .index_add_(0, index_TR.flatten(), source_TD.double().repeat_interleave(3, 0))
    )
    assert_close(found_UD, judge_UD)


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
    kind=st.sampled_from(["adagrad", "adam", "adagrad_tokens", "adam_tokens"]),
)
def test_optimisers_native_equal_reference(count, width, seed, kind):
    num_rows = 2000
    from_tokens = kind.endswith("tokens")
    draw = (
        torch.randint(num_rows // 3, (count,), generator=generator(seed))
        if from_tokens
        else torch.randperm(num_rows)[:count]
    )
    grads = torch.randn(count, width, generator=generator(seed + 1))

    def step(table: dict[str, torch.Tensor], backend: str) -> None:
        g = grads.to(table["weights"].dtype)
        if kind.startswith("adagrad"):
            call = rows.rowwise_adagrad_from_tokens_ if from_tokens else rows.rowwise_adagrad_
            call(table["weights"], table["v"], draw, g, lr=0.1, eps=1e-8, backend=backend)
        else:
            call = rows.rowwise_adam_from_tokens_ if from_tokens else rows.rowwise_adam_
            call(*table.values(), draw, g, lr=0.1, betas=(0.9, 0.999), eps=1e-8, backend=backend)

    judge, before = (
        tables(num_rows, width, seed, torch.float64),
        tables(num_rows, width, seed, torch.float32),
    )
    step(judge, "reference")
    seen = []
    for thread_count in (1, 2):
        with threads(thread_count):
            found = tables(num_rows, width, seed, torch.float32)
            step(found, "native")
        assert torch.equal(found["steps"], judge["steps"])
        for name in ("weights", "m", "v"):
            assert_close(found[name], judge[name], name)
        untouched = torch.ones(num_rows, dtype=torch.bool).index_fill_(0, draw, False)
        assert all(torch.equal(found[name][untouched], before[name][untouched]) for name in found)
        seen.append(found)
    assert kind == "adam_tokens" or all(torch.equal(seen[0][name], seen[1][name]) for name in found)


def test_a_table_with_gaps_is_updated_in_place_too():
    wide = torch.zeros(4, 6)
    rows.rowwise_adagrad_(
        wide[:, :3], torch.zeros(4), torch.tensor([2]), torch.ones(1, 3), lr=1.0, eps=0.0
    )
    assert wide[2].tolist() == [-1.0, -1.0, -1.0, 0.0, 0.0, 0.0] and wide.sum() == -3


FIVE, THREE = torch.ones(5, 3), torch.tensor([0, 1, 4])
ADAM = (FIVE, FIVE.clone(), torch.ones(5))
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
    (ValueError, lambda: rows.rowwise_adagrad_(FIVE, torch.ones(4), THREE, torch.ones(3, 3), lr=1, eps=0)),
    (ValueError, lambda: rows.rowwise_adagrad_(FIVE, torch.ones(5), THREE, torch.ones(3, 2), lr=1, eps=0)),
    (ValueError, lambda: rows.rowwise_adagrad_(FIVE, torch.ones(5), torch.tensor([1, 0, 1]), torch.ones(3, 3), lr=1, eps=0)),
    (TypeError, lambda: rows.rowwise_adagrad_(FIVE, torch.ones(5).double(), THREE, torch.ones(3, 3), lr=1, eps=0)),
    (IndexError, lambda: rows.rowwise_adagrad_from_tokens_(FIVE, torch.ones(5), THREE + 1, torch.ones(3, 3), lr=1, eps=0)),
    (TypeError, lambda: rows.rowwise_adam_(*ADAM, FIVE[:, 0], THREE, torch.ones(3, 3), lr=1, betas=(0.9, 0.9), eps=0)),
    (ValueError, lambda: rows.rowwise_adam_(*ADAM, torch.arange(5), THREE, torch.ones(3, 3), lr=1, betas=(0.9, 1.0), eps=0)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_operands_are_refused(number):
    error, call = WRONG[number]
    with pytest.raises(error, match=r"\w+ \w+"):
        call()
