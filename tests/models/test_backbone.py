"""A cached prefix gives the scores of the full pass; candidates do not see each other."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from slipstream.errors import SlipstreamError
from slipstream.models.backbone import KV, make_view
from tests.support.models_samples import KINDS, given, model, part, prefill

CASES = [
    (kind, bias)
    for kind in KINDS
    for bias in (["none"] if kind == "sasrec" else ["own", "next", "none"])
]
TASKS = ["retrieval", "ranking"]
USERS = {"user_features": ("age",)}


def joined(batch, pieces):
    """Sequences cut out one by one, laid end to end again."""
    lengths = torch.tensor([piece.timestamps_T.numel() for piece in pieces])

    def lay(name):
        return torch.cat([getattr(piece, name) for piece in pieces])

    return replace(
        batch,
        rows={name: torch.cat([piece.rows[name] for piece in pieces]) for name in batch.rows},
        offsets_B1=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        timestamps_T=lay("timestamps_T"),
        next_timestamps_T=lay("next_timestamps_T"),
        token_ids_T=lay("token_ids_T"),
        labels_TA=lay("labels_TA"),
    )


def split(net, batch, cuts):
    """The batch as (prefix, rest, where the rest begins): after what the prefix has cached."""
    users = range(len(cuts))
    prefix = joined(
        batch,
        [replace(part(batch, b, 0, cut), num_candidates_B=None) for b, cut in enumerate(cuts)],
    )
    starts = [max(0, cut - net.held_back_behaviours) for cut in cuts]
    rest = joined(batch, [part(batch, b, starts[b]) for b in users])
    return (
        replace(prefix, num_candidates_B=None),
        replace(rest, num_candidates_B=batch.num_candidates_B),
        starts,
    )


def check_prefix(net, batch, cuts, spoil=lambda kvs: kvs):
    full = net(batch)
    prefix, rest, starts = split(net, batch, cuts)
    # What follows the prefix is not known yet: its last behaviour looks from anywhere.
    last = prefix.offsets_B1[1:][prefix.offsets_B1.diff() > 0] - 1
    next_times = prefix.next_timestamps_T.clone()
    next_times[last] += 12_345_678
    past = spoil(prefill(net, replace(prefix, next_timestamps_T=next_times)))
    expected = torch.cat(
        [
            full[int(batch.offsets_B1[b]) + start : int(batch.offsets_B1[b + 1])]
            for b, start in enumerate(starts)
        ]
    )
    return net(rest, past), expected


@pytest.mark.parametrize("candidates", [None, [2, 3, 0, 1]])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("kind", "time_bias"), CASES)
def test_cached_forward_equals_full_forward(kind, time_bias, task, candidates):
    net = model(kind, task, time_bias=time_bias, **USERS)
    cached, expected = check_prefix(net, given([9, 6, 0, 3], candidates, **USERS), [5, 3, 0, 1])
    assert_close(cached, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("kind", "time_bias"), CASES)
def test_cached_forward_equals_full_forward_in_fp32(kind, time_bias, task):
    net = model(kind, task, dtype=torch.float32, time_bias=time_bias)
    cached, expected = check_prefix(net, given([14, 12], [3, 4], dtype=torch.float32), [9, 6])
    assert_close(cached, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("time_bias", ["own", "next"])
@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_a_functional_time_encoding_keeps_a_prefix_exact(kind, time_bias):
    net = model(kind, "ranking", time_bias=time_bias, time_encoding="functional", **USERS)
    batch = given([9, 6, 0, 3], [2, 3, 0, 1], **USERS)
    cached, expected = check_prefix(net, batch, [5, 3, 0, 1])
    assert_close(cached, expected, atol=1e-12, rtol=1e-12)
    cached, expected = check_prefix(net, batch, [5, 3, 0, 1], change_one_time)
    assert (cached - expected).abs().max() > 1e-4


def drop_one_token(kvs):
    return [kv.first(kv.offsets_B1.diff() - torch.tensor([1, 0])) for kv in kvs]


def swap_layers(kvs):
    return kvs[::-1]


def replace_one_token(kvs):
    spoilt = [KV(kv.k_SHK.clone(), kv.v_SHV.clone(), kv.timestamps_S, kv.offsets_B1) for kv in kvs]
    for kv in spoilt:
        kv.k_SHK[2], kv.v_SHV[2] = kv.k_SHK[3], kv.v_SHV[3]
    return spoilt


def change_one_time(kvs):
    times = kvs[0].timestamps_S.clone()
    times[2] -= 900_000_000
    return [replace(kv, timestamps_S=times) for kv in kvs]


SPOILERS = [drop_one_token, swap_layers, replace_one_token, change_one_time]


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [(k, s) for k in KINDS for s in SPOILERS if (k, s) != ("sasrec", change_one_time)],
)
def test_a_wrong_prefix_changes_the_scores(kind, spoil):
    cached, expected = check_prefix(model(kind, "ranking"), given([9, 6], [2, 3]), [5, 3], spoil)
    assert (cached - expected).abs().max() > 1e-4


def test_with_next_times_the_last_behaviour_must_be_held_back():
    net, batch = model("hstu", time_bias="next"), given([9])
    assert net.held_back_behaviours == 1
    prefix = replace(
        part(batch, 0, 0, 5), next_timestamps_T=part(batch, 0, 0, 5).next_timestamps_T + 9_999_999
    )
    stream = net.stream(prefix, None)
    _, unheld = net.backbone(stream.x_SD, stream.layout, keep_kv=True)
    assert (net(part(batch, 0, 5), unheld) - net(batch)[5:]).abs().max() > 1e-6


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("kind", "time_bias"), CASES)
def test_a_prefix_grows_piece_by_piece(kind, time_bias, task):
    net, batch = model(kind, task, time_bias=time_bias, **USERS), given([10], **USERS)
    held = net.held_back_behaviours
    first = prefill(net, part(batch, 0, 0, 4))
    second = prefill(net, part(batch, 0, 4 - held, 7), first)
    for mine, whole in zip(second, prefill(net, part(batch, 0, 0, 7)), strict=True):
        assert torch.equal(mine.offsets_B1, whole.offsets_B1)
        assert torch.equal(mine.timestamps_S, whole.timestamps_S)
        assert_close(mine.k_SHK, whole.k_SHK, atol=1e-12, rtol=1e-12)
        assert_close(mine.v_SHV, whole.v_SHV, atol=1e-12, rtol=1e-12)
    assert_close(
        net(part(batch, 0, 7 - held), second), net(batch)[7 - held :], atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("kind", "time_bias"), CASES)
def test_swapping_one_candidate_changes_no_other_score(kind, time_bias, cached):
    net, batch = model(kind, "ranking", time_bias=time_bias), given([12, 7], [4, 3])
    rows = {"item": batch.rows["item"].clone()}
    rows["item"][9] = -rows["item"][9]
    other = replace(batch, rows=rows)
    if cached:
        scores, others = check_prefix(net, batch, [6, 3])[0], check_prefix(net, other, [6, 3])[0]
        changed = 9 - 6 + net.held_back_behaviours
    else:
        scores, others, changed = net(batch), net(other), 9
    same = torch.ones(scores.shape[0], dtype=torch.bool)
    same[changed] = False
    assert torch.equal(scores[same], others[same])
    assert not torch.allclose(scores[changed], others[changed])


def test_a_candidate_scores_as_if_it_were_the_only_one():
    net, batch = model("hstu", "ranking"), given([9], [3])
    scores = net(batch)
    for candidate in range(6, 9):
        rows = torch.tensor([*range(6), candidate])
        one = joined(batch, [part(batch, 0, 0, 6), part(batch, 0, candidate, candidate + 1)])
        one = replace(one, offsets_B1=torch.tensor([0, 7]), num_candidates_B=torch.tensor([1]))
        assert rows.numel() == one.timestamps_T.numel()
        assert_close(net(one)[6], scores[candidate], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_prefix_holds_its_keys_and_values_and_no_more(kind):
    net = model(kind)
    for kv in prefill(net, given([5, 4])):
        for tensor in (kv.k_SHK, kv.v_SHV):
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_past_that_does_not_belong_is_refused():
    net, batch = model("hstu"), given([5, 4])
    past = prefill(net, batch)
    with pytest.raises(ValueError, match="1 layers cannot continue a model of 2"):
        net(batch, past[:1])
    with pytest.raises(ValueError, match="a past of 2 sequences, but 1"):
        net(part(batch, 0), past)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(SlipstreamError, match="17 tokens does not fit the model's 16 positions"):
        model("hstu")(given([17]))
    # Relative positions have no end: those further away share the last entry.
    assert model("hstu", position_embedding=False)(given([17])).shape == (17, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_alone_are_those_of_the_whole_layer(kind, dtype):
    net = model(kind, "ranking", dtype)
    layer, batch = net.backbone.layers[-1], given([5, 1, 9], dtype=dtype)
    stream = net.stream(batch, None)
    view = make_view(stream.layout, None)
    _, whole = layer(stream.x_SD, view, None)
    for alone, expected in zip(layer.keys_values(stream.x_SD, view, None), whole, strict=True):
        assert torch.equal(alone, expected)
    past = [KV(*whole, view.key_timestamps_S, view.q_offsets_B1)] * len(net.backbone.layers)
    view = make_view(stream.layout, past)
    _, whole = layer(stream.x_SD, view, past[-1])
    for alone, expected in zip(layer.keys_values(stream.x_SD, view, past[-1]), whole, strict=True):
        assert torch.equal(alone, expected)
