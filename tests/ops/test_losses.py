"""Retrieval losses: native equals the fp64 reference with all gradients, wrong ones are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops import losses, losses_tiled_native, rows_native
from tests.support.loss_cases import LossCase
from tests.support.operator_parity import assert_parity, needs_native

CASES = st.builds(
    LossCase,
    tokens=st.sampled_from([0, 1, 2, 7, 40, 300]),
    num_rows=st.sampled_from([1, 2, 9, 301]),
    width=st.sampled_from([1, 3, 4, 7, 8, 9, 15, 16, 17, 24, 33, 50, 64, 72, 131]),
    negatives=st.sampled_from([0, 1, 3, 4, 5, 8, 17, 128]),
    seed=st.integers(0, 2**31),
)


@needs_native
@settings(max_examples=80, deadline=None)
@given(case=CASES, corrected=st.booleans())
def test_sampled_softmax_native_equals_reference(case, corrected):
    assert_parity(case.sampled(corrected, 0.7), case.hidden_TD, case.rows_UD)


@needs_native
def test_sampled_softmax_native_equals_reference_through_buckets(monkeypatch):
    """Row gradients too large for a copy per thread are summed bucket by bucket."""
    monkeypatch.setattr(rows_native, "_COPIES_BYTES", 0)
    case = LossCase(90, 4001, 50, 33, seed=3)
    assert_parity(case.sampled(True, 0.5), case.hidden_TD, case.rows_UD)


@needs_native
@pytest.mark.parametrize(("num_rows", "width"), [(211, 50), (211, 33), (211, 131), (9001, 50)])
def test_a_token_has_the_same_bits_among_many_as_alone(num_rows, width):
    """Many tokens read copies of the rows, a few read them where they lie; of many rows all do."""
    case = LossCase(120, num_rows, width, 37, seed=8)

    def loss_and_gradient(tokens):
        hidden_TD = case.hidden_TD[tokens].requires_grad_()
        loss_T = losses.sampled_softmax_loss(
            hidden_TD,
            case.rows_UD,
            case.targets_T[tokens],
            case.negatives_TR[tokens],
            temperature=0.2,
            backend="native",
        )
        return loss_T.detach(), torch.autograd.grad(loss_T.sum(), hidden_TD)[0]

    together = loss_and_gradient(slice(None))
    apart = zip(*(loss_and_gradient(slice(t, t + 1)) for t in range(120)), strict=True)
    for joined, single in zip(together, apart, strict=True):
        assert torch.equal(joined, torch.cat(single))


@needs_native
@settings(max_examples=40, deadline=None)
@given(case=CASES, corrected=st.booleans())
def test_shared_softmax_native_equals_reference(case, corrected):
    assert_parity(case.shared(corrected, 0.7), case.hidden_TD, case.rows_UD)


@needs_native
@settings(max_examples=40, deadline=None)
@given(case=CASES)
def test_full_softmax_native_equals_reference(case):
    assert_parity(case.full(0.7), case.hidden_TD, case.rows_UD)


@needs_native
# The last catalogue is too large for sums of each thread's own.
@pytest.mark.parametrize(
    ("tokens", "num_rows", "width"),
    [(0, 9, 8), (1, 1, 1), (95, 301, 50), (200, 4001, 64), (9, 140_000, 64)],
)
def test_a_loss_that_weighs_tokens_alike_has_the_reference_gradients(tokens, num_rows, width):
    case = LossCase(tokens, num_rows, width, 1, seed=6)
    full = case.full(0.3)
    assert_parity(lambda *x, backend: full(*x, backend=backend).sum(), case.hidden_TD, case.rows_UD)


@needs_native
@pytest.mark.parametrize("width", [0, 8])
def test_no_token_and_no_item_give_no_loss(width):
    hidden_TD, rows_ND = torch.ones(0, width), torch.ones(0, width)
    nothing_T = torch.zeros(0, dtype=torch.int64)
    loss_T = losses.full_softmax_loss(hidden_TD, rows_ND, nothing_T, backend="native")
    assert loss_T.shape == (0,)


@needs_native
def test_the_whole_catalogue_gives_the_same_loss_with_and_without_gradients():
    case = LossCase(40, 301, 50, 1, seed=1)
    with torch.no_grad():
        plain_T = case.full(0.7)(case.hidden_TD, case.rows_UD, backend="native")
    tracked_T = case.full(0.7)(case.hidden_TD.requires_grad_(), case.rows_UD, backend="native")
    assert torch.equal(plain_T, tracked_T.detach())


@needs_native
def test_tiles_join_without_a_seam(monkeypatch):
    monkeypatch.setattr(losses_tiled_native, "_TILE_VALUES", 1000)
    case = LossCase(37, 211, 20, 100, seed=5)
    assert_parity(case.full(0.2), case.hidden_TD, case.rows_UD)
    assert_parity(case.shared(True, 0.2), case.hidden_TD, case.rows_UD)


@needs_native
def test_sharp_temperatures_keep_their_precision():
    """Cosine similarity over temperature 0.05, and logits far beyond what exp can hold."""
    case = LossCase(50, 301, 64, 128, seed=8)
    hidden_TD, rows_UD = (torch.nn.functional.normalize(x) for x in (case.hidden_TD, case.rows_UD))
    for operator in (case.sampled(False, 0.05), case.shared(False, 0.05), case.full(0.05)):
        assert_parity(operator, hidden_TD, rows_UD)
    for operator in (case.sampled(False, 0.05), case.shared(False, 0.05), case.full(0.05)):
        loss_T = operator(case.hidden_TD * 10, case.rows_UD * 10, backend="native")
        assert torch.isfinite(loss_T).all() and loss_T.max() > 100


@needs_native
def test_no_gradient_wanted_gives_the_same_loss_and_keeps_nothing():
    case = LossCase(40, 301, 50, 128, seed=1)
    with torch.no_grad():
        plain_T = case.sampled(True, 0.7)(case.hidden_TD, case.rows_UD, backend="native")
    tracked_T = case.sampled(True, 0.7)(
        case.hidden_TD.requires_grad_(), case.rows_UD, backend="native"
    )
    assert torch.equal(plain_T, tracked_T.detach()) and not plain_T.requires_grad
    tracked_T.sum().backward()
    assert case.hidden_TD.grad is not None and case.rows_UD.grad is None


@needs_native
def test_forward_keeps_nothing_as_large_as_tokens_x_negatives_x_width():
    case, kept = LossCase(300, 50, 64, 128, seed=4), []

    def keep(tensor):
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        case.sampled(True, 0.7)(
            case.hidden_TD.requires_grad_(), case.rows_UD.requires_grad_(), backend="native"
        )
    assert kept and sum(kept) < 300 * 128 * 64 * 4 / 4


@needs_native
def test_a_nan_is_not_swallowed():
    case = LossCase(20, 30, 16, 8, seed=2)
    case.hidden_TD[3, 5] = float("nan")
    for operator in (case.sampled(False, 1.0), case.shared(False, 1.0), case.full(1.0)):
        loss_T = operator(case.hidden_TD, case.rows_UD, backend="native")
        assert torch.isnan(loss_T[3]) and torch.isfinite(loss_T[:3]).all()


H, E, T3 = torch.ones(3, 4), torch.ones(6, 4), torch.tensor([0, 5, 2])
N32 = torch.zeros(3, 2, dtype=torch.int64)
WRONG = [
    (IndexError, lambda: losses.sampled_softmax_loss(H, E, T3 + 1, N32)),
    (IndexError, lambda: losses.sampled_softmax_loss(H, E, T3, N32 - 1)),
    (IndexError, lambda: losses.sampled_softmax_loss(H, E, T3, N32 + 2**62)),
    (IndexError, lambda: losses.sampled_softmax_loss(H, E[:0], T3, N32)),
    (TypeError, lambda: losses.sampled_softmax_loss(H, E, T3.int(), N32)),
    (TypeError, lambda: losses.sampled_softmax_loss(H, E, T3, N32.double())),
    (TypeError, lambda: losses.sampled_softmax_loss(H, E.double(), T3, N32)),
    (TypeError, lambda: losses.sampled_softmax_loss(H.long(), E.long(), T3, N32)),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E[:, :3], T3, N32)),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3[:2], N32)),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32[:2])),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32[0])),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32, temperature=0.0)),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32, temperature=float("nan"))),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32, target_log_q_T=H)),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32, negative_log_q_TR=H)),
    (ValueError, lambda: losses.sampled_softmax_loss(H, E, T3, N32, backend="fast")),
    (IndexError, lambda: losses.shared_softmax_loss(H, E, T3, torch.tensor([6]))),
    (ValueError, lambda: losses.shared_softmax_loss(H, E, T3, N32)),
    (ValueError, lambda: losses.shared_softmax_loss(H, E, T3, T3, negative_log_q_R=H[0])),
    (IndexError, lambda: losses.full_softmax_loss(H, E, T3 - 1)),
    (ValueError, lambda: losses.full_softmax_loss(H[0], E, T3)),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_operands_are_refused(number):
    error, call = WRONG[number]
    with pytest.raises(error, match=r"\w+ \w+"):
        call()
