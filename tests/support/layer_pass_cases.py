"""Passes through compiled layers, compared with the layers' own forward."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slipstream.models.backbone import KV, Backbone, pass_tokens
from slipstream.models.inputs import Layout
from slipstream.ops.kv_precision import PRECISIONS, round_rows
from tests.support.models_samples import KINDS, model

TOLERANCE = 4e-6  # as a share of the largest output


def backbone(kind: str, **settings: Any) -> Backbone:
    """The layers of a small model in fp32."""
    net = model(kind, dtype=torch.float32, **({"dim": 32, "max_len": 400} | settings))
    return net.backbone


def layout_of(lengths: Sequence[int], candidates: Sequence[int] | None = None) -> Layout:
    """Sequences of random times; the last `candidates[b]` tokens of each are candidates."""
    generator = torch.Generator().manual_seed(3)
    times_T = torch.cat(
        [torch.randint(0, 90_000, (n,), generator=generator).cumsum(0) for n in lengths]
    )
    offsets_B1 = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    counts_B = None if candidates is None else torch.tensor(candidates)
    return Layout(offsets_B1, times_T, times_T, torch.zeros_like(times_T), None, counts_B)


def tokens_of(net: Backbone, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, net.config.dim, generator=generator)


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """The layers run one by one, by the reference back-end."""
    before = os.environ.get("SLIPSTREAM_BACKEND")
    os.environ["SLIPSTREAM_BACKEND"] = "reference"
    try:
        yield
    finally:
        os.environ.pop("SLIPSTREAM_BACKEND")
        if before is not None:
            os.environ["SLIPSTREAM_BACKEND"] = before


@torch.no_grad()
def check_pass(net: Backbone, x_TD: torch.Tensor, layout: Layout) -> None:
    """The compiled pass equals the layers one by one."""
    assert net.compiled(x_TD) is not None
    compiled_TD, _ = net(x_TD, layout)
    with plain_layers():
        assert net.compiled(x_TD) is None
        plain_TD, _ = net(x_TD, layout)
    largest = float(plain_TD.abs().max())
    torch.testing.assert_close(compiled_TD, plain_TD, atol=TOLERANCE * largest, rtol=0)


@torch.no_grad()
def history_and_rest(
    net: Backbone, x_TD: torch.Tensor, layout: Layout, cut: int
) -> tuple[list[KV], torch.Tensor, Layout]:
    """One sequence cut in two: keys and values of its first tokens, and the tokens after them."""
    times_T = layout.timestamps_T
    first = Layout(torch.tensor([0, cut]), times_T[:cut], times_T[:cut], layout.token_ids_T[:cut])
    _, kept = net(x_TD[:cut], first, keep_kv=True)
    rest = Layout(
        torch.tensor([0, x_TD.shape[0] - cut]),
        times_T[cut:],
        times_T[cut:],
        layout.token_ids_T[cut:],
        None,
        layout.num_candidates_B,
    )
    return kept, x_TD[cut:], rest


@torch.no_grad()
def check_all(kinds: Sequence[str] = KINDS) -> None:
    """Every kind, in widths that fill vectors and in others, with and without a past."""
    for kind in kinds:
        for widths in ({}, {"heads": 1, "dqk": 25, "dv": 13}, {"dim": 24, "heads": 3}):
            net = backbone(kind, **widths)
            for candidates in (None, [1, 0, 40]):
                layout = layout_of([9, 1, 150], candidates)
                check_pass(net, tokens_of(net, 160), layout)
            check_past(net)
            check_precisions(net)


def check_past(net: Backbone) -> None:
    """A sequence behind its past has the bits of the whole sequence."""
    layout, x_TD = layout_of([150], [30]), tokens_of(net, 150)
    whole_TD, _ = net(x_TD, layout)
    for cut in (1, 33, 97, 120):
        past, rest_TD, rest = history_and_rest(net, x_TD, layout, cut)
        found_TD, _ = net(rest_TD, rest, past)
        assert torch.equal(found_TD, whole_TD[cut:]), (net.config.kind, cut)


def check_precisions(net: Backbone) -> None:
    """In fewer bits the compiled pass rounds as the reference does."""
    layout, x_TD = layout_of([90]), tokens_of(net, 90)
    layers = net.compiled(x_TD)
    assert layers is not None
    x_TD = net.enter(x_TD, layout)
    exact = net.new_rows(90)
    layers.run(x_TD, pass_tokens(layout, None), layers=range(1), rows=[exact])
    for precision in PRECISIONS:
        rows = net.new_rows(90)
        layers.run(
            x_TD, pass_tokens(layout, None), layers=range(1), rows=[rows], precision=precision
        )
        for ours, exact_rows in ((rows.k_SHK, exact.k_SHK), (rows.v_SHV, exact.v_SHV)):
            right = round_rows(exact_rows, precision)
            # A product that lies between two steps may be rounded to either without FMA.
            assert (ours != right).float().mean() < 0.01, (net.config.kind, precision)
            steps = exact_rows.abs().amax(-1, keepdim=True) / 120
            assert ((ours - right).abs() <= (steps if precision == "int8" else 0)).all()
