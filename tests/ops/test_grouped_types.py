"""Groups of tokens: who belongs to whom, parts of them, and offsets that do not fit."""

import pytest
import torch

from slipstream.ops.grouped_types import TokenGroups, one_token_groups, weight_starts


def groups():
    return TokenGroups(torch.tensor([0, 3, 3, 5]), torch.tensor([0, 1, 2, 4]))


def test_every_token_and_every_set_has_its_group():
    assert groups().count == 3 and groups().largest == 3
    assert groups().of_tokens().tolist() == [0, 0, 0, 2, 2]
    assert groups().of_sets().tolist() == [0, 1, 2, 2]
    alone = one_token_groups(4)
    assert alone.of_tokens().tolist() == alone.of_sets().tolist() == [0, 1, 2, 3]


def test_a_part_of_the_groups_counts_from_zero():
    part = groups().take(1, 3)
    assert part.offsets_G1.tolist() == [0, 0, 2] and part.set_offsets_G1.tolist() == [0, 1, 3]
    doubled = part.map(lambda offsets: 2 * offsets)
    assert doubled.offsets_G1.tolist() == [0, 0, 4]


def test_weights_lie_group_after_group_in_whole_blocks():
    # 3 tokens in 2 blocks of 2, 1 set of 5; no tokens; 2 tokens in 1 block, 2 sets of 5.
    assert weight_starts(groups(), 5, 2).tolist() == [0, 20, 20, 40]
    assert weight_starts(groups(), 5, 1).tolist() == [0, 15, 15, 35]


@pytest.mark.parametrize(
    ("offsets", "sets", "error", "sentence"),
    [
        ([0, 2], [0, 4], ValueError, "groups must rise from 0 to 5"),
        ([0, 3, 2, 5], [0, 1, 2, 4], ValueError, "groups must rise from 0 to 5"),
        ([0, 5], [1, 4], ValueError, "sets must rise from 0 to 4"),
        ([0, 5], [0, 1, 4], ValueError, "same number of groups"),
        ([0.0, 5.0], [0, 4], TypeError, "list of int64"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, sets, error, sentence):
    with pytest.raises(error, match=sentence):
        TokenGroups(torch.tensor(offsets), torch.tensor(sets)).check(5, 4)
