"""Compares a back-end with the fp64 reference: outputs and gradients, contiguous or not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from slipstream.ops import native

needs_native = pytest.mark.skipif(
    not native.available(), reason="native kernels were not built on this machine"
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    """A seeded fp64 tensor that requires its gradient."""
    generator = torch.Generator().manual_seed(seed + 7 * len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory with gaps."""
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        return tensor
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def results(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """[output, gradient of each input], for an upstream gradient that differs by value."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = (
        torch.linspace(0.3, 1.7, max(out.numel(), 1), dtype=torch.float64)[: out.numel()]
        .reshape(out.shape)
        .to(out.dtype)
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def assert_close(
    found: torch.Tensor,
    expected: torch.Tensor,
    name: str = "",
    tolerance: float = 1e-5,
    floor: float = 1e-6,
) -> None:
    """Compare relative to the largest expected value, or to `floor` where that is larger."""
    assert found.shape == expected.shape, (
        f"{name}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    )
    if expected.numel() == 0:
        return
    scale = max(expected.abs().max().item(), floor)
    error = (found.double() - expected).abs().max().item()
    assert error <= tolerance * scale, f"{name}: off by {error / scale:.2e} of the largest value"


def assert_parity(
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    backend: str = "native",
    thread_counts: tuple[int, ...] = (1, 2),
    floor: float = 1e-6,
) -> None:
    """Compare function(*inputs, backend=…) with the reference in fp64; repetitions bit for bit."""
    expected = results(lambda *x: function(*x, backend="reference"), *(x.double() for x in inputs))
    for count in thread_counts:
        with threads(count):
            found = results(lambda *x: function(*x, backend=backend), *inputs)
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                name = (
                    f"{backend}, {count} thread(s), "
                    f"{'output' if number == 0 else f'gradient {number}'}"
                )
                assert_close(one, other, name, floor=floor)
            again = results(lambda *x: function(*x, backend=backend), *(strided(x) for x in inputs))
            for one, other in zip(found, again, strict=True):
                assert torch.equal(one, other), (
                    "a repetition (from memory with gaps) gave other bits"
                )
