"""Jagged attention with the bias inside against the matmul peak, a loop and padded PyTorch.

Forward and backward are measured together. `mfu` counts causal pairs: sum of n(n+1) · heads ·
(dqk + dv), three times for training. Recomputing and padding earn nothing. The peak is the best
matmul sample of the whole run; `mfu_median_peak` divides by the median sample of the same shape, as
earlier results did. Touch this when attention gets another shape or back-end.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.bench import harness
from slipstream.ops.allocator import keep_freed_memory
from slipstream.ops.attention import RelativeBias, fuxi_attention, hstu_attention

SHAPES = ((4, 64), (8, 32), (2, 32), (1, 50))
DIVISOR, BUCKETS, REACH = 200.0, 128, 1024


class AttentionProblem:
    """A batch with lognormal lengths (mean 200), growing timestamps, and leaves for gradients."""

    def __init__(self, sequences: int, heads: int, width: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.empty(sequences).log_normal_(0, 0.7, generator=g)
        self.lengths = (lengths * (200 / lengths.mean())).round().clamp(1, REACH).long()
        self.offsets_B1 = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        tokens = int(self.offsets_B1[-1])
        self.q, self.k, self.v = (
            torch.randn(tokens, heads, width, generator=g).requires_grad_() for _ in range(3)
        )
        self.position = torch.randn(2 * REACH - 1, generator=g).requires_grad_()
        self.time = torch.randn(BUCKETS + 1, generator=g).requires_grad_()
        self.decay = torch.tensor([1.0, 1.0, 0.25]).requires_grad_()
        gaps = (torch.randn(tokens, generator=g) * 3 + 5).clamp(0, 14).exp().long()
        self.times_T = gaps.cumsum(0) + 10**9
        self.grad = torch.randn(tokens, heads, width, generator=g)
        n = self.lengths.double()
        self.flops = 3.0 * float((n * (n + 1)).sum()) * heads * 2 * width

    def leaves(self, bias: bool, functional: bool = False) -> list[torch.Tensor]:
        """Return the tensors whose gradients are computed."""
        time = self.decay if functional else self.time
        return [self.q, self.k, self.v, *([self.position, time] if bias else [])]

    def ours(
        self, bias: bool, fuxi: bool = False, functional: bool = False
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Return a step of our operator: forward, then backward to the leaves.

        The time bias goes by buckets or, with `functional`, is a function of the gap.
        """
        time = {"decay_3": self.decay} if functional else {"time_W": self.time}
        tables = RelativeBias(self.position, **time) if bias else None
        grad = torch.stack([self.grad] * 3, dim=1) if fuxi else self.grad

        def step() -> tuple[torch.Tensor, ...]:
            operator = fuxi_attention if fuxi else hstu_attention
            out = operator(
                self.q,
                self.k,
                self.v,
                self.offsets_B1,
                divisor=DIVISOR,
                bias=tables,
                timestamps_T=self.times_T,
            )
            return torch.autograd.grad(out, self.leaves(bias, functional), grad)

        return step


def _plain(
    p: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, times: torch.Tensor
) -> torch.Tensor:
    """Compute HSTU attention of [..., n, heads, width] in plain PyTorch, as research code does."""
    n = q.shape[-3]
    apart = torch.arange(n).unsqueeze(1) - torch.arange(n).unsqueeze(0)
    buckets = (
        (times.unsqueeze(-1) - times.unsqueeze(-2))
        .abs()
        .clamp(min=1)
        .float()
        .log()
        .div(0.301)
        .long()
        .clamp(max=BUCKETS)
    )
    bias = p.position[apart + REACH - 1] + p.time[buckets]
    scores = torch.einsum("...ihd,...jhd->...hij", q, k) + bias.unsqueeze(-3)
    weights = torch.nn.functional.silu(scores) / DIVISOR * (apart >= 0)
    return torch.einsum("...hij,...jhd->...ihd", weights, v)


def loop(p: AttentionProblem) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a step in plain PyTorch over one sequence after the other."""

    def step() -> tuple[torch.Tensor, ...]:
        spans = list(zip(p.offsets_B1[:-1].tolist(), p.offsets_B1[1:].tolist(), strict=True))
        out = torch.cat([_plain(p, p.q[a:b], p.k[a:b], p.v[a:b], p.times_T[a:b]) for a, b in spans])
        return torch.autograd.grad(out, p.leaves(True), p.grad)

    return step


def padded(p: AttentionProblem) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a step in plain PyTorch over all sequences padded to the longest."""
    longest = int(p.lengths.max())
    real = torch.arange(longest).unsqueeze(0) < p.lengths.unsqueeze(1)

    def pad(x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(*real.shape, *x.shape[1:])
        return out.masked_scatter(real.reshape(*real.shape, *[1] * (x.dim() - 1)), x)

    def step() -> tuple[torch.Tensor, ...]:
        out = _plain(p, pad(p.q), pad(p.k), pad(p.v), pad(p.times_T))[real]
        return torch.autograd.grad(out, p.leaves(True), p.grad)

    return step


def check_agreement(p: AttentionProblem) -> None:
    """Refuse peers that compute something else.

    Their logarithm in fp32 puts some pairs into another bucket, so gradients may differ by 5 %.
    """
    for peer in (loop(p), padded(p)):
        for ours, theirs in zip(p.ours(True)(), peer(), strict=True):
            apart = float((ours - theirs).norm() / ours.norm())
            if apart > 0.05:
                raise AssertionError(
                    f"the peer computes something else: gradients differ by {apart:.1%}"
                )


def _shape_rows(heads: int, width: int, sequences: int, repeats: int) -> list[harness.Row]:
    problem = AttentionProblem(sequences, heads, width)
    multiply, multiply_flops = harness.matmul_peak()
    variants = {
        "peak": multiply,
        "bias": problem.ours(True),
        "no bias": problem.ours(False),
        "fuxi": problem.ours(True, fuxi=True),
        "fuxi functional": problem.ours(True, fuxi=True, functional=True),
    }
    samples = harness.interleave(variants, repeats=repeats, warm_up=2)
    typical = multiply_flops / harness.median(samples["peak"])
    rows = []
    for name in ("bias", "no bias", "fuxi", "fuxi functional"):
        seconds = harness.median(samples[name])
        # FuXi adds two products with the values: 2 more widths on top of dqk + dv
        flops = problem.flops * (2 if name.startswith("fuxi") else 1)
        rows.append(
            {
                "variant": f"{heads}x{width} {name}",
                "ms": seconds * 1e3,
                "spread": harness.spread(samples[name]),
                "gflops": flops / seconds / 1e9,
                "mfu_median_peak": flops / seconds / typical,
                "samples": samples[name],
                "peak_samples": [multiply_flops / each / 1e9 for each in samples["peak"]],
            }
        )
    return rows


def add_mfu(rows: list[harness.Row]) -> None:
    """Add the MFU of every row, against the best matmul sample of all of them."""
    best = max(sample for row in rows for sample in row["peak_samples"])
    for row in rows:
        row["mfu"], row["peak_gflops"] = row["gflops"] / best, best


def _peer_rows(sequences: int, repeats: int) -> list[harness.Row]:
    """Measure the batch of the 4x64 row, ours and the peers in turns.

    Padded, 128 sequences need about 17 GB, which are kept from round to round, so that the peer
    does not pay for mapping them again.
    """
    check_agreement(AttentionProblem(8, 4, 64))
    keep_freed_memory(-1)  # give nothing back
    print(
        f"the peers: {sequences} sequences, {repeats} rounds after one that maps their memory",
        file=sys.stderr,
    )
    problem = AttentionProblem(sequences, 4, 64)
    variants = {"ours": problem.ours(True), "loop": loop(problem), "padded": padded(problem)}
    samples = harness.interleave(variants, repeats=repeats)
    ours = harness.median(samples["ours"])
    return [
        {
            "variant": f"4x64 bias, {sequences} sequences: {name}",
            "ms": harness.median(taken) * 1e3,
            "spread": harness.spread(taken),
            "times_ours": harness.median(taken) / ours,
            "samples": taken,
        }
        for name, taken in samples.items()
    ]


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Measure every shape and the peers; print, write and return the result."""
    keep_freed_memory()
    sequences, repeats = (32, 5) if quick else (128, 11)
    rows = [row for heads, width in SHAPES for row in _shape_rows(heads, width, sequences, repeats)]
    add_mfu(rows)
    mfu = {row["variant"]: row["mfu"] for row in rows}
    peers = _peer_rows(sequences, 5)
    times = {row["variant"].rsplit(": ", 1)[1]: row["times_ours"] for row in peers}
    claims = {f"mfu_{shape}_bias": mfu[f"{shape} bias"] for shape in ("4x64", "8x32", "2x32")}
    claims |= {"x_over_loop": times["loop"], "x_over_padded": times["padded"]}
    return harness.finish("kernels", rows + peers, claims, json_path)
