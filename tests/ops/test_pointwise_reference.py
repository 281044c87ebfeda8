"""The reference pointwise operators: gradients by finite differences, values against torch."""

import torch
import torch.nn.functional as F

from slipstream.ops import counter_random, pointwise
from tests.support.operator_parity import leaf

IDS_T = torch.tensor([3, 2**63 - 1, 0, 17, -4])


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(
        pointwise.linear_silu, (leaf(5, 3), leaf(4, 3, seed=1), leaf(4))
    )
    assert torch.autograd.gradcheck(pointwise.rms_norm, (leaf(5, 4), leaf(4)))
    assert torch.autograd.gradcheck(
        lambda x: pointwise.dropout(x, p=0.4, seed=5, token_ids_T=IDS_T), (leaf(5, 6),)
    )
    for norm in ("layer", "rms"):
        assert torch.autograd.gradcheck(
            lambda x, g, w, norm=norm: pointwise.norm_gate_dropout(
                x, g, norm=norm, p=0.3, seed=9, token_ids_T=IDS_T, weight_F=w
            ),
            (leaf(5, 6), leaf(5, 6, seed=1), leaf(6)),
        )


def test_the_dropout_mask_is_drawn_from_token_ids():
    x_TD = torch.ones(5, 33, dtype=torch.float64)
    keep = counter_random.random_uniform(11, IDS_T, 33) >= 0.25
    dropped = pointwise.dropout(x_TD, p=0.25, seed=11, token_ids_T=IDS_T)
    assert torch.equal(dropped != 0, keep) and 0.5 < keep.float().mean() < 0.95
    assert torch.equal(dropped[keep], torch.full_like(dropped[keep], 1 / 0.75))
    assert pointwise.dropout(x_TD, p=0.25, seed=None, token_ids_T=None) is x_TD
    shuffled = torch.tensor([4, 2, 0, 1, 3])
    assert torch.equal(
        pointwise.dropout(x_TD, p=0.25, seed=11, token_ids_T=IDS_T[shuffled]), dropped[shuffled]
    )


def test_norms_agree_with_torch():
    x_TD, gate_TD = leaf(4, 6).detach(), leaf(4, 6, seed=3).detach()
    layer_TD = F.layer_norm(x_TD, (6,), eps=1e-6)
    torch.testing.assert_close(pointwise.layer_norm(x_TD), layer_TD)
    torch.testing.assert_close(pointwise.norm_gate_dropout(x_TD, gate_TD), layer_TD * gate_TD)
    torch.testing.assert_close(pointwise.rms_norm(x_TD), F.rms_norm(x_TD, (6,), eps=1e-6))
