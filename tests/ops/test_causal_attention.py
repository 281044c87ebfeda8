"""SASRec's attention: the padded batches equal the formula; candidates and prefixes are exact."""

import pytest
import torch
from torch.testing import assert_close

from slipstream.ops.causal_attention import softmax_attention, softmax_attention_reference

LENGTHS = [5, 0, 1, 40, 32, 33, 64, 7]


def jagged(lengths, heads=2, dqk=4, dv=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k = (torch.randn(tokens, heads, dqk, generator=generator, dtype=dtype) for _ in range(2))
    v = torch.randn(tokens, heads, dv, generator=generator, dtype=dtype)
    return q, k, v, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


@pytest.mark.parametrize(("dqk", "dv"), [(4, 4), (4, 6), (8, 3)])
def test_padded_batches_equal_the_formula_with_gradients(dqk, dv):
    q, k, v, offsets = jagged(LENGTHS, dqk=dqk, dv=dv)
    weight = torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (softmax_attention, softmax_attention_reference):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        extra = {} if function is softmax_attention else {"num_candidates_B": None}
        out = function(*leaves, offsets, offsets, scale=0.3, **extra)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for mine, oracle in zip(*results, strict=True):
        assert_close(mine, oracle, atol=1e-12, rtol=1e-10)


def test_one_token_and_the_written_out_second_row():
    q, k, v, offsets = jagged([1, 2], heads=1)
    out = softmax_attention(q, k, v, offsets, scale=0.5)
    assert_close(out[0], v[0])
    scores = torch.stack([(q[2, 0] @ k[1, 0]) * 0.5, (q[2, 0] @ k[2, 0]) * 0.5]).exp()
    assert_close(out[2, 0], (scores[0] * v[1, 0] + scores[1] * v[2, 0]) / scores.sum())


def test_a_sequence_does_not_depend_on_the_other_sequences():
    q, k, v, offsets = jagged(LENGTHS, dtype=torch.float32)
    out = softmax_attention(q, k, v, offsets, scale=0.5)
    for b, length in enumerate(LENGTHS):
        rows = slice(int(offsets[b]), int(offsets[b + 1]))
        alone = softmax_attention(q[rows], k[rows], v[rows], torch.tensor([0, length]), scale=0.5)
        assert torch.equal(alone, out[rows])


def test_cached_tail_equals_the_full_pass():
    q, k, v, offsets = jagged([6, 3, 40])
    full = softmax_attention(q, k, v, offsets, scale=0.5)
    tails = [2, 3, 0]
    rows = torch.cat(
        [
            torch.arange(int(end) - tail, int(end))
            for end, tail in zip(offsets[1:], tails, strict=True)
        ]
    )
    out = softmax_attention(q[rows], k, v, torch.tensor([0, 2, 5, 5]), offsets, scale=0.5)
    assert_close(out, full[rows], atol=1e-12, rtol=1e-12)


def test_candidates_see_history_and_themselves():
    q, k, v, offsets = jagged([7, 4])
    candidates = torch.tensor([3, 4])
    out = softmax_attention(q, k, v, offsets, num_candidates_B=candidates, scale=0.5)
    for place in range(4, 7):
        rows = torch.tensor([0, 1, 2, 3, place])
        alone = softmax_attention(q[rows], k[rows], v[rows], torch.tensor([0, 5]), scale=0.5)
        assert_close(out[place], alone[4], atol=1e-12, rtol=1e-12)
    assert_close(out[7:], v[7:])  # no history: only itself


def test_wrong_shapes_are_refused():
    q, k, v, offsets = jagged([3, 2])
    with pytest.raises(ValueError, match="belong together"):
        softmax_attention(q, k[:, :1], v, offsets, scale=1.0)
    with pytest.raises(ValueError, match="end at the number of tokens"):
        softmax_attention(q, k, v, torch.tensor([0, 3, 4]), scale=1.0)
    with pytest.raises(ValueError, match="tail of the keys"):
        softmax_attention(q, k, v, offsets, torch.tensor([0, 2, 5]), scale=1.0)
