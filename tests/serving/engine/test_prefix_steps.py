"""A pass behind what is cached equals the whole pass: in steps, in tiles, in fewer bits, plain."""

import contextlib
from dataclasses import replace

import pytest
import torch

from slipstream.serving.engine.prefix import CachedTokens, PrefixBuffer
from slipstream.serving.engine.prefix_steps import StreamPass
from tests.support.layer_pass_cases import plain_layers
from tests.support.serving_samples import (
    CASES,
    candidates,
    cut,
    engine,
    history,
    largest_difference,
    same_tokens,
)


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
        for one, other in zip(whole.tensors, pieces.tensors, strict=True):
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
    stream = served.passes.stream([query], True)
    with pytest.raises(ValueError, match="do not fit"):
        StreamPass(served.model, stream, target=PrefixBuffer(served.shape, 10))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["hstu", "fuxi", "sasrec"])
def test_in_fewer_bits_hit_miss_extension_and_tiles_have_the_same_bits(tmp_path, kind, precision):
    bias = "none" if kind == "sasrec" else "next"
    served = engine(tmp_path, kind, time_bias=bias, kv_precision=precision)
    exact = engine(tmp_path, kind, time_bias=bias)
    whole, few, many = history(300), candidates(40), candidates(300)
    full = served.rank(None, whole, few)
    prefix = served.prefill(cut(whole, 0, 290))
    assert largest_difference(served.rank(prefix, cut(whole, 290), few), full) == 0
    extended = served.prefill(whole, past=prefix)
    assert largest_difference(served.rank(extended, None, few), full) == 0
    assert same_tokens(extended, served.prefill(whole))
    tiled = served.rank(prefix, cut(whole, 290), many)
    assert largest_difference(tiled, served.rank(None, whole, many)) == 0
    assert 0 < largest_difference(full, exact.rank(None, whole, few)) < 0.02
    assert served.shape.token_bytes < 0.6 * exact.shape.token_bytes


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("kind", ["hstu", "fuxi", "sasrec"])
def test_plain_layers_serve_the_same_scores(tmp_path, kind, precision):
    served = engine(tmp_path, kind, time_bias="none", kv_precision=precision)
    whole, few, many = history(200), candidates(20), candidates(300)
    found = {}
    for name, layers in (("compiled", contextlib.nullcontext()), ("plain", plain_layers())):
        with layers:
            prefix = served.prefill(cut(whole, 0, 150))
            longer = served.prefill(cut(whole, 0, 190), past=prefix)
            hit = served.rank(longer, cut(whole, 190), few)
            pair = served.rank_batch([served.make_query(longer, cut(whole, 190), few)] * 2)
            tiles = served.rank(longer, cut(whole, 190), many)
            full = served.rank(None, whole, few)
        # Plain passes sum in orders of their own: a value between two steps is stored as either.
        close = 1e-5 if precision == "fp32" or name == "compiled" else 5e-3
        assert max(largest_difference(hit, other) for other in (pair[1], full)) < close
        found[name] = (hit, tiles)
    tolerance = 1e-5 if precision == "fp32" else 5e-3
    for one, other in zip(found["compiled"], found["plain"], strict=True):
        assert largest_difference(one, other) < tolerance


def test_a_pass_leaves_the_prefix_as_it_is(tmp_path):
    served, whole = engine(tmp_path), history(120)
    prefix, fresh = served.prefill(whole), served.prefill(whole)
    served.rank(prefix, None, candidates(300))
    assert same_tokens(prefix, fresh)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_a_ranking_of_whole_histories_leaves_the_prefixes_of_a_prefill(
    tmp_path, kind, bias, compiled
):
    served = engine(tmp_path, kind, time_bias=bias)
    lengths, items = (40, 9, 120), candidates(12)
    queries, buffers = [], []
    for number, length in enumerate(lengths):
        query = served.make_query(None, history(length, seed=number), items)
        buffers.append(PrefixBuffer(served.shape, served.cached_tokens(length)))
        kept = CachedTokens(buffers[-1], buffers[-1].capacity)
        queries.append(replace(query, kept=kept if number != 1 else None))
    with contextlib.nullcontext() if compiled else plain_layers():
        scores = served.rank_batch(queries)
        for number, length in enumerate(lengths):
            whole = history(length, seed=number)
            alone = served.rank_batch([replace(queries[number], kept=None)])[0]
            assert largest_difference(scores[number], alone) <= 1e-6
            if number == 1:
                continue
            encoded = served.encode(whole)
            filled = served.prefix_of(encoded, buffers[number])
            whole_prefix = served.prefill(encoded)
            if compiled:
                assert same_tokens(filled, whole_prefix)
            # torch's own products may round otherwise where they have other rows beside them
            pairs = zip(filled.buffer.tensors, whole_prefix.buffer.tensors, strict=True)
            assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
            assert largest_difference(served.rank(filled, None, items), alone) <= 1e-6
