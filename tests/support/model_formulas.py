"""HSTU, FuXi and SASRec written a second time, straight from the papers' formulas, in fp64."""

import math
from dataclasses import replace

import torch
from torch.nn.functional import gelu, layer_norm, silu
from torch.testing import assert_close

from slipstream.ops.counter_random import random_uniform
from tests.support.models_samples import given, model, part, rows_of

EPS = 1e-6
LENGTHS = [6, 0, 1, 9]


def heads_first(x_NF, heads):
    return x_NF.unflatten(1, (heads, -1)).transpose(0, 1)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def bias_maps(layer, times, looks_from):
    """The dense [N, N] position and time maps of one sequence, entry by entry."""
    size = len(times)
    position, time = (
        torch.zeros(size, size, dtype=torch.float64),
        torch.zeros(size, size, dtype=torch.float64),
    )
    position_P, time_W = layer.relative.position_P, layer.relative.time_W
    decay_3 = layer.relative.decay_3
    for i in range(size):
        for j in range(size):
            if position_P is not None:
                position[i, j] = position_P[i - j + (len(position_P) - 1) // 2]
            if time_W is not None:
                distance = max(abs(looks_from[i] - times[j]), 1)
                time[i, j] = time_W[min(math.floor(math.log(distance) / 0.301), len(time_W) - 1)]
            if decay_3 is not None:
                a, log_b, logit_c = decay_3.tolist()
                days = abs(looks_from[i] - times[j]) / 86_400
                time[i, j] = a * math.exp(-math.exp(log_b) * days ** (1 / (1 + math.exp(-logit_c))))
    return position, time


def hstu_layer(layer, x, times, looks_from, drop):
    heads, dv, dqk = layer.config.heads, layer.config.dv, layer.config.dqk
    mixed = silu(layer_norm(x, x.shape[1:], eps=EPS) @ layer.uvqk_FD.T)
    u, v, q, k = mixed.split([heads * dv, heads * dv, heads * dqk, heads * dqk], dim=1)
    position, time = bias_maps(layer, times, looks_from)
    scores = heads_first(q, heads) @ heads_first(k, heads).transpose(1, 2) + position + time
    attended = (silu(scores) / layer.config.max_len).tril() @ heads_first(v, heads)
    normed = layer_norm(attended.transpose(0, 1).flatten(1), (heads * dv,), eps=EPS)
    return x + drop(u * normed, 0) @ layer.output.weight.T + layer.output.bias


def fuxi_layer(layer, x, times, looks_from, drop):
    heads, dv, dqk = layer.config.heads, layer.config.dv, layer.config.dqk
    mixed = silu(rms(x, layer.norm_D) @ layer.uvqk_FD.T)
    u, v, q, k = mixed.split([3 * heads * dv, heads * dv, heads * dqk, heads * dqk], dim=1)
    position, time = bias_maps(layer, times, looks_from)
    semantic = (
        silu(heads_first(q, heads) @ heads_first(k, heads).transpose(1, 2)) / layer.config.max_len
    )
    channels = [m.tril() @ heads_first(v, heads) for m in (semantic, time, position)]
    stacked = torch.cat([c.transpose(0, 1).flatten(1) for c in channels], dim=1)
    x = (
        x
        + drop(rms(stacked, layer.channels_norm_F) * u, 0) @ layer.output.weight.T
        + layer.output.bias
    )
    ffn = layer.feed_forward
    normed = rms(x, ffn.norm_D)
    return x + drop(silu(normed @ ffn.gate_FD.T) * (normed @ ffn.up_FD.T), 1) @ ffn.down_DF.T


def affine(x, norm):
    return layer_norm(x, x.shape[1:], eps=EPS) * norm.weight + norm.bias


def sasrec_layer(layer, x, times, looks_from, drop):
    heads, dv, dqk = layer.config.heads, layer.config.dv, layer.config.dqk
    v, q, k = layer.vqk(affine(x, layer.attention_norm)).split(
        [heads * dv, heads * dqk, heads * dqk], dim=1
    )
    scores = heads_first(q, heads) @ heads_first(k, heads).transpose(1, 2) / math.sqrt(dqk)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ heads_first(v, heads)
    x = x + drop(layer.output(attended.transpose(0, 1).flatten(1)), 0)
    return x + drop(layer.down(drop(gelu(layer.up(affine(x, layer.inner_norm))), 1)), 2)


FORMULAS = {"hstu": hstu_layer, "fuxi": fuxi_layer, "sasrec": sasrec_layer}


def dropping(one, p, layer):
    """Dropout with a mask for every layer and place, drawn from (seed, token id, column)."""

    def drop(x, place):
        if one.dropout_seed is None:
            return x
        drawn = random_uniform(one.dropout_seed + 8 * layer + place, one.token_ids_T, x.shape[1])
        return torch.where(drawn >= p, x / (1 - p), 0.0)

    return drop


def plain_forward(net, one):
    """One sequence through the formulas: scaled rows plus positions, then layer after layer."""
    x = one.rows["item"] * math.sqrt(net.config.dim)
    if net.config.position_embedding:
        x = x + net.backbone.positions_PD[: len(x)]
    x = dropping(one, net.config.input_dropout, net.config.blocks)(x, 0)
    times = one.timestamps_T.tolist()
    looks_from = one.next_timestamps_T.tolist() if net.config.time_bias == "next" else times
    for index, layer in enumerate(net.backbone.layers):
        x = FORMULAS[net.config.kind](
            layer, x, times, looks_from, dropping(one, net.config.dropout, index)
        )
    return affine(x, net.backbone.final_norm) if net.backbone.final_norm is not None else x


def check_formula(kind, settings, position_embedding, dropout_seed):
    """The jagged model gives for every sequence what the formulas give."""
    net = model(kind, position_embedding=position_embedding, **settings)
    batch = given(LENGTHS, dropout_seed=dropout_seed)
    out = net(batch)
    for b, length in enumerate(LENGTHS):
        if length:
            assert_close(
                out[rows_of(batch, b)], plain_forward(net, part(batch, b)), atol=1e-11, rtol=1e-11
            )


def check_time_bias(kind, **settings):
    """Own and next time differ only in the time from which a token looks back."""
    own, following = (model(kind, time_bias=bias, **settings) for bias in ("own", "next"))
    blind = model(kind, time_bias="none")
    following.load_state_dict(own.state_dict())
    blind.load_state_dict(
        {
            name: value
            for name, value in own.state_dict().items()
            if not name.endswith(("time_W", "decay_3"))
        }
    )
    batch = given([6])
    outs = [net(batch) for net in (own, following, blind)]
    assert not torch.allclose(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    assert torch.equal(following(replace(batch, next_timestamps_T=batch.timestamps_T)), outs[0])
