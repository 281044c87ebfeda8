"""Seeded attention problems, and the comparison of a back-end with the fp64 reference."""

from dataclasses import dataclass

import torch

from slipstream.ops.attention import RelativeBias, fuxi_attention, hstu_attention

OPERATORS = {"hstu": hstu_attention, "fuxi": fuxi_attention}
NAMES = ("out", "grad q", "grad k", "grad v", "grad position", "grad time")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] = (5, 0, 1, 33)
    tail: int | None = None  # at most this many queries per sequence
    heads: int = 2
    key_width: int = 8
    value_width: int = 8
    position: bool = True
    time: bool = True
    functional: bool = False  # the time bias is a function of the gap, not a table
    positions: int = 40  # reach of the position table; longer distances share its end
    buckets: int = 20
    candidates: bool = False
    window: int | None = None
    sorted_times: bool = True
    contiguous: bool = True
    operator: str = "hstu"
    seed: int = 0

    def time_parameters(self, g: torch.Generator) -> torch.Tensor:
        """The table of buckets, or a, b and c of the function, neither slow nor fast."""
        if not self.functional:
            return torch.randn(self.buckets + 1, generator=g)
        return torch.rand(3, generator=g) * torch.tensor([2.0, 2.0, 0.9]) + 0.1

    def bias(self, position: torch.Tensor | None, time: torch.Tensor | None) -> RelativeBias:
        return RelativeBias(position, **{"decay_3" if self.functional else "time_W": time})

    def arguments(self) -> dict:
        g = torch.Generator().manual_seed(self.seed)
        queries = [
            length if self.tail is None else min(length, self.tail) for length in self.lengths
        ]
        q_offsets, k_offsets = (torch.tensor([0, *n]).cumsum(0) for n in (queries, self.lengths))
        times = [
            torch.rand(n, generator=g).mul(14).exp().long().cumsum(0) + 10**9 for n in self.lengths
        ]
        if not self.sorted_times:
            times = [t[torch.randperm(len(t), generator=g)] for t in times]
        tails = [t[len(t) - n :] for t, n in zip(times, queries, strict=True)]
        empty = torch.zeros(0, dtype=torch.int64)
        found = {
            "q": torch.randn(int(q_offsets[-1]), self.heads, self.key_width, generator=g),
            "k": torch.randn(int(k_offsets[-1]), self.heads, self.key_width, generator=g),
            "v": torch.randn(int(k_offsets[-1]), self.heads, self.value_width, generator=g),
            "position": torch.randn(2 * self.positions - 1, generator=g) if self.position else None,
            "time": self.time_parameters(g) if self.time else None,
            "q_offsets": q_offsets,
            "k_offsets": k_offsets,
            "timestamps": torch.cat([empty, *tails]),
            "k_timestamps": torch.cat([empty, *times]),
            "candidates": None,
        }
        if self.candidates:
            found["candidates"] = torch.tensor(
                [int(torch.randint(0, n + 1, (), generator=g)) for n in self.lengths],
                dtype=torch.int64,
            )
        return found


def run(case: Case, backend: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The output and all gradients, in the order of NAMES, without those of absent tables."""
    a = case.arguments()
    leaves = {
        name: a[name].to(dtype).requires_grad_()
        for name in ("q", "k", "v", "position", "time")
        if a[name] is not None
    }

    def given(name: str) -> torch.Tensor:
        tensor = leaves[name]
        return tensor if case.contiguous else tensor.transpose(0, 2).contiguous().transpose(0, 2)

    out = OPERATORS[case.operator](
        given("q"),
        given("k"),
        given("v"),
        a["q_offsets"],
        a["k_offsets"] if case.tail is not None else None,
        divisor=25.0,
        scale=0.4,
        bias=case.bias(leaves.get("position"), leaves.get("time"))
        if case.position or case.time
        else None,
        timestamps_T=a["timestamps"] if case.time else None,
        k_timestamps_S=a["k_timestamps"] if case.time else None,
        num_candidates_B=a["candidates"],
        window=case.window,
        backend=backend,
    )
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.seed + 1)).to(
        dtype
    )
    if not case.contiguous:
        weights = weights.transpose(0, -1).contiguous().transpose(0, -1)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), weights)]


def distances(case: Case, backend: str) -> dict[str, float]:
    """|difference| / |reference| of a back-end in fp32 and the reference in fp64, by name."""
    names = NAMES[:4] + (NAMES[4:5] if case.position else ()) + (NAMES[5:] if case.time else ())
    pairs = zip(names, run(case, "reference", torch.float64), run(case, backend), strict=True)
    return {
        name: float((expected - found).norm() / expected.norm().clamp_min(1e-9))
        for name, expected, found in pairs
    }


def assert_close(case: Case, backend: str, tolerance: float = 1e-5) -> None:
    found = distances(case, backend)
    assert all(value <= tolerance for value in found.values()), f"{case}: {found}"
