"""Index arithmetic over jagged tokens: offsets, places, joining and cutting."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.jagged import (
    join_order,
    leading_tokens,
    offsets_from_lengths,
    segment_mean,
    sequence_and_place,
    take_segments,
)


def test_offsets_sequences_and_places_of_a_small_batch():
    offsets_B1 = offsets_from_lengths(torch.tensor([2, 0, 3]))
    assert offsets_B1.tolist() == [0, 2, 2, 5]
    sequence_T, place_T = sequence_and_place(offsets_B1)
    assert sequence_T.tolist() == [0, 0, 2, 2, 2] and place_T.tolist() == [0, 1, 0, 1, 2]
    assert leading_tokens(offsets_B1, torch.tensor([1, 1, 2])).tolist() == [0, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5))
def test_joining_and_cutting_are_each_others_inverse(pairs):
    past_B, new_B = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1))
    past_offsets, new_offsets = offsets_from_lengths(past_B), offsets_from_lengths(new_B)
    past = [
        ("past", int(b), int(p)) for b, p in zip(*sequence_and_place(past_offsets), strict=True)
    ]
    new = [("new", int(b), int(p)) for b, p in zip(*sequence_and_place(new_offsets), strict=True)]
    offsets, order = join_order(past_offsets, new_offsets)
    joined = [(past + new)[i] for i in order.tolist()]
    expected = [
        token
        for b, (before, after) in enumerate(pairs)
        for token in [("past", b, p) for p in range(before)] + [("new", b, p) for p in range(after)]
    ]
    assert joined == expected
    assert offsets.tolist() == offsets_from_lengths(past_B + new_B).tolist()
    assert [joined[i] for i in leading_tokens(offsets, past_B).tolist()] == past


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 5), max_size=7), st.integers(0, 99))
def test_means_of_taken_segments_and_their_gradients_are_those_of_a_plain_loop(lengths, rows, seed):
    rows = [row % len(lengths) for row in rows]
    offsets_N1 = offsets_from_lengths(torch.tensor(lengths))
    codes_V = torch.randint(0, 5, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    table_UD = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    plain_UD = table_UD.detach().clone().requires_grad_()
    rows_T = torch.tensor(rows, dtype=torch.int64)
    keys_S, offsets_T1 = take_segments(codes_V, offsets_N1, rows_T)
    means_TD = segment_mean(table_UD[keys_S], offsets_T1)
    plain = [torch.zeros(0, 3, dtype=torch.float64)]
    for row in rows:
        codes = codes_V[offsets_N1[row] : offsets_N1[row + 1]].tolist()
        plain.append((sum(plain_UD[code] for code in codes) / len(codes)).unsqueeze(0))
    expected_TD = torch.cat(plain)
    assert means_TD.shape == (len(rows), 3)
    assert torch.allclose(means_TD, expected_TD, rtol=0, atol=1e-15)
    weights_TD = torch.randn(len(rows), 3, dtype=torch.float64)
    (means_TD * weights_TD).sum().backward()
    if rows:
        (expected_TD * weights_TD).sum().backward()
        assert torch.allclose(table_UD.grad, plain_UD.grad, rtol=0, atol=1e-14)
