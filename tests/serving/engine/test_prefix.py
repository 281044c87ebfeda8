"""A prefix's memory: sizes as announced, copies exact, views of the same bytes."""

from itertools import pairwise

import pytest
import torch

from slipstream.serving.engine.prefix import KVShape, PrefixBuffer
from tests.support.serving_samples import engine, history

SHAPE = KVShape(layers=2, heads=2, dqk=4, dv=8)


def filled(capacity):
    buffer = PrefixBuffer(SHAPE, capacity)
    for number, tensor in enumerate(buffer.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    return buffer


def test_buffers_are_aligned_and_their_parts_do_not_overlap():
    buffer = filled(5)
    parts = buffer.tensors
    spans = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
    assert all(begin % 64 == spans[0][0] % 64 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= buffer.nbytes == SHAPE.nbytes(5)


def test_too_little_memory_is_refused():
    with pytest.raises(ValueError, match="needs"):
        PrefixBuffer(SHAPE, 5, torch.empty(SHAPE.nbytes(5) - 1, dtype=torch.uint8))


def test_the_first_tokens_are_copied_and_nothing_behind_them():
    source, copy = filled(5), PrefixBuffer(SHAPE, 9)
    for tensor in copy.tensors:
        tensor.zero_()
    copy.copy_tokens(source, 3)
    assert copy.times_S.tolist() == [*source.times_S[:3].tolist(), 0, 0, 0, 0, 0, 0]
    for ours, theirs in zip(copy.tensors[1:], source.tensors[1:], strict=True):
        assert torch.equal(ours[:3], theirs[:3]) and not ours[3:].any()


def test_a_layer_is_a_view():
    buffer = filled(5)
    kv = buffer.layer(1, 4)
    buffer.layers[1][0][0] = -1.0
    assert (kv.k_SHK[0] == -1.0).all() and kv.k_SHK.shape[0] == kv.timestamps_S.numel() == 4


def test_the_key_names_version_user_and_history(tmp_path):
    served = engine(tmp_path, blocks=1)
    prefix = served.prefill(history(40))
    key = prefix.key("ann")
    assert (key.version, key.user, key.behaviours) == (served.version, "ann", 40)
    assert key.digest == served.encode(history(40)).digest()
    assert prefix.cached_behaviours == served.cached_behaviours(40) == 40 - served.hold
    assert served.cached_behaviours(2 * served.hold - 1) == 0
