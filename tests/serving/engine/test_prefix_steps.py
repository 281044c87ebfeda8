"""A prefill in steps leaves what one pass leaves, whatever the size of its chunks."""

import pytest
import torch

from slipstream.serving.engine.prefix import PrefixBuffer
from slipstream.serving.engine.prefix_steps import in_place_view
from tests.support.serving_samples import engine, history


def prefilled(served, encoded, chunk_tokens):
    tokens = served.cached_tokens(len(encoded))
    buffer = PrefixBuffer(served.shape, tokens)
    steps = list(served.prefill_steps(encoded, buffer, None, chunk_tokens))
    return buffer, steps


def test_chunks_of_any_size_leave_the_same_bits(tmp_path):
    served = engine(tmp_path)
    encoded = served.encode(history(300))
    whole, _ = prefilled(served, encoded, 10_000)
    for chunk_tokens in (16, 100, 512):
        pieces, _ = prefilled(served, encoded, chunk_tokens)
        assert torch.equal(whole.times_S, pieces.times_S)
        for one, other in zip(whole.keys + whole.values, pieces.keys + pieces.values, strict=True):
            assert torch.equal(one, other)


def test_a_step_is_one_chunk_through_one_layer(tmp_path):
    served = engine(tmp_path)
    encoded = served.encode(history(300))
    _, one_chunk = prefilled(served, encoded, 10_000)
    assert one_chunk == [served.cached_tokens(300)] * served.shape.layers
    _, many = prefilled(served, encoded, 100)
    assert len(many) % served.shape.layers == 0 and len(many) > len(one_chunk)
    assert many == sorted(many) and many[-1] == served.cached_tokens(300)


def test_tokens_that_do_not_fit_the_buffer_are_refused(tmp_path):
    served = engine(tmp_path, blocks=1)
    query = served.make_query(None, history(9), [])
    stream = served._stream([query], True)
    with pytest.raises(ValueError, match="do not fit"):
        in_place_view(stream, PrefixBuffer(served.shape, 10), 5)
