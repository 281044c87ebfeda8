"""A batch gives some of its users as a batch, and its tokens keep their numbers."""

import torch

from slipstream.data.batch import JaggedBatch


def batch():
    return JaggedBatch(
        sample_ids_B=torch.tensor([4, 9, 2]),
        first_positions_B=torch.tensor([0, 10, 3]),
        offsets_B1=torch.tensor([0, 2, 3, 6]),
        items_T=torch.tensor([11, 12, 21, 31, 32, 33]),
        timestamps_T=torch.arange(6) * 10,
        next_items_T=torch.tensor([12, -1, -1, 32, 33, -1]),
        next_timestamps_T=torch.arange(6) * 10 + 5,
        supervised_T=torch.tensor([True, False, True, True, True, False]),
        actions={"click": torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])},
        user_features={"age": torch.tensor([1, 2, 3])},
    )


def test_sizes_follow_from_the_offsets():
    one = batch()
    assert (one.num_users, one.num_tokens, one.lengths_B.tolist()) == (3, 6, [2, 1, 3])


def test_tokens_are_numbered_by_user_and_place_in_the_log():
    numbers = batch().token_ids_T
    assert (numbers >> 24).tolist() == [4, 4, 9, 2, 2, 2]
    assert (numbers & (1 << 24) - 1).tolist() == [0, 1, 10, 3, 4, 5]


def test_some_users_are_a_batch_whose_tokens_keep_their_numbers():
    one = batch()
    part = one.take(torch.tensor([2, 0]))
    assert part.sample_ids_B.tolist() == [2, 4] and part.offsets_B1.tolist() == [0, 3, 5]
    assert part.items_T.tolist() == [31, 32, 33, 11, 12]
    assert part.next_items_T.tolist() == [32, 33, -1, 12, -1]
    assert part.actions["click"].tolist() == [1, 0, 1, 0, 1]
    assert part.user_features["age"].tolist() == [3, 1]
    assert part.token_ids_T.tolist() == [*one.token_ids_T[3:], *one.token_ids_T[:2]]
    assert one.take(torch.tensor([], dtype=torch.int64)).num_tokens == 0


def test_a_change_reaches_every_tensor_and_to_is_a_copy_of_all():
    seen = []
    one = batch()
    changed = one.map_tensors(lambda tensor: seen.append(tensor) or tensor.clone())
    assert len(seen) == 10
    assert torch.equal(changed.items_T, one.items_T) and changed.items_T is not one.items_T
    assert torch.equal(one.to("cpu").actions["click"], one.actions["click"])
