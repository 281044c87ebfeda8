"""Digests of operators' outputs and gradients, printed as JSON; run by tests/same_as_before.py.

It runs in this tree and in an earlier one, so it looks an operator up by every place it has had.
"""

import hashlib
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch

PLACES = {
    "attention": ("attention",),
    "softmax_attention": ("causal_attention", "softmax_attention"),
    "losses": ("losses",),
    "pointwise": ("pointwise", "neighbours"),
    "rows": ("rows",),
    "item_draws": ("item_draws",),
}


def operator(module: str, name: str) -> Callable[..., Any]:
    """The operator, wherever this tree keeps it."""
    for place in PLACES[module]:
        try:
            return getattr(importlib.import_module(f"slipstream.ops.{place}"), name)
        except ModuleNotFoundError:
            continue
    raise LookupError(name)


def digest(tensors: list[torch.Tensor]) -> list[str]:
    """A digest of each tensor's bits."""
    return [
        hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
        for tensor in tensors
    ]


def with_gradients(call: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[str]:
    """Digests of an output and of the gradients of its leaves."""
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    out = call(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return digest([out, *torch.autograd.grad(out, leaves, weights)])


def attention(backend: str, dtype: torch.dtype) -> dict[str, list[str]]:
    """HSTU's and FuXi's attention: training, cached ranking, candidates, a window."""
    g = torch.Generator().manual_seed(1)
    lengths, found = (5, 0, 1, 33, 90), {}
    bias_type = operator("attention", "RelativeBias")
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    queries = torch.tensor([0, *(min(length, 4) for length in lengths)]).cumsum(0)
    total, tail = int(offsets[-1]), int(queries[-1])
    times = torch.cat(
        [torch.rand(n, generator=g).mul(14).exp().long().cumsum(0) + 10**9 for n in lengths]
    )
    tail_times = torch.cat(
        [times[offsets[b + 1] - min(n, 4) : offsets[b + 1]] for b, n in enumerate(lengths)]
    )
    for heads, width in ((2, 8), (4, 64), (8, 32)):
        k, v = (torch.randn(total, heads, width, generator=g, dtype=dtype) for _ in range(2))
        q = torch.randn(total, heads, width, generator=g, dtype=dtype)
        position, time = (torch.randn(n, generator=g, dtype=dtype) for n in (79, 21))
        settings = {
            "training": (q, offsets, None, times, {}),
            "window": (q, offsets, None, times, {"window": 7}),
            "candidates": (
                q,
                offsets,
                None,
                times,
                {"num_candidates_B": torch.tensor([2, 0, 1, 10, 30])},
            ),
            "cached": (q[:tail], queries, offsets, tail_times, {"k_timestamps_S": times}),
        }
        for name in ("hstu_attention", "fuxi_attention"):
            for case, (q_used, q_offsets, k_offsets, q_times, more) in settings.items():
                found[f"{name} {heads}x{width} {case} {backend} {dtype}"] = with_gradients(
                    lambda q, k, v, position, time, name=name, o=(q_offsets, k_offsets), t=q_times, m=more: (  # noqa: E501
                        operator("attention", name)(
                            q,
                            k,
                            v,
                            *o,
                            divisor=25.0,
                            scale=0.4,
                            bias=bias_type(position, time),
                            timestamps_T=t,
                            backend=backend,
                            **m,
                        )
                    ),
                    q_used,
                    k,
                    v,
                    position,
                    time,
                )
    return found


def losses(backend: str) -> dict[str, list[str]]:
    """The softmax losses, retrieval's objective."""
    g = torch.Generator().manual_seed(2)
    hidden, rows = torch.randn(70, 50, generator=g), torch.randn(300, 50, generator=g)
    targets = torch.randint(0, 300, (70,), generator=g)
    negatives = torch.randint(0, 300, (70, 32), generator=g)
    common = {"temperature": 0.05, "backend": backend}

    def call(name: str, *more: torch.Tensor) -> list[str]:
        loss = operator("losses", name)
        return with_gradients(lambda h, r: loss(h, r, targets, *more, **common), hidden, rows)

    return {
        f"sampled_softmax_loss {backend}": call("sampled_softmax_loss", negatives),
        f"shared_softmax_loss {backend}": call("shared_softmax_loss", negatives[0]),
        f"full_softmax_loss {backend}": call("full_softmax_loss"),
    }


def pointwise(backend: str) -> dict[str, list[str]]:
    """Norms, gates, dropout."""
    g = torch.Generator().manual_seed(3)
    x, gate = (torch.randn(70, 50, generator=g) for _ in range(2))
    weight, bias = torch.randn(96, 50, generator=g), torch.randn(96, generator=g)
    drop = {"p": 0.2, "seed": 11, "token_ids_T": torch.arange(70), "backend": backend}
    linear, gated, dropout, norm = (
        operator("pointwise", name)
        for name in ("linear_silu", "norm_gate_dropout", "dropout", "rms_norm")
    )
    return {
        f"linear_silu {backend}": with_gradients(
            lambda x, w, b: linear(x, w, b, backend=backend), x, weight, bias
        ),
        f"norm_gate_dropout {backend}": with_gradients(lambda x, u: gated(x, u, **drop), x, gate),
        f"dropout {backend}": with_gradients(lambda x: dropout(x, **drop), x),
        f"rms_norm {backend}": with_gradients(lambda x: norm(x, backend=backend), x),
    }


def rows(backend: str) -> dict[str, list[str]]:
    """Gathering, adding up and updating rows; drawing items."""
    g = torch.Generator().manual_seed(4)
    table, index = torch.randn(200, 50, generator=g), torch.randint(0, 200, (90,), generator=g)
    touched, grads = torch.randperm(200, generator=g)[:60], torch.randn(60, 50, generator=g)
    found = {
        f"take_rows {backend}": with_gradients(
            lambda t: operator("rows", "take_rows")(t, index, backend=backend), table
        )
    }
    weights, state = table.clone(), torch.rand(200, generator=g)
    operator("rows", "rowwise_adagrad_")(
        weights, state, touched, grads, lr=0.1, eps=1e-8, backend=backend
    )
    found[f"rowwise_adagrad_ {backend}"] = digest([weights, state])
    weights, m, v = table.clone(), torch.randn(200, 50, generator=g), torch.rand(200, generator=g)
    steps = torch.arange(200)
    operator("rows", "rowwise_adam_")(
        weights, m, v, steps, touched, grads, lr=0.1, betas=(0.9, 0.98), eps=1e-8, backend=backend
    )
    found[f"rowwise_adam_ {backend}"] = digest([weights, m, v, steps])
    drawn = operator("item_draws", "draw_items")(7, torch.arange(50), 20, 1000, backend=backend)
    return {**found, f"draw_items {backend}": digest([drawn])}


def softmax_attention() -> dict[str, list[str]]:
    """SASRec's attention."""
    g = torch.Generator().manual_seed(5)
    offsets = torch.tensor([0, 5, 5, 6, 40])
    q, k, v = (torch.randn(40, 2, 16, generator=g) for _ in range(3))
    call = operator("softmax_attention", "softmax_attention")
    return {
        "softmax_attention": with_gradients(
            lambda q, k, v: call(q, k, v, offsets, scale=0.25), q, k, v
        )
    }


def main() -> None:
    """Print the digests of every operator and back-end."""
    torch.set_num_threads(1)
    found = softmax_attention()
    for backend in ("reference", "native"):
        for part in (losses, pointwise, rows):
            found |= part(backend)
        for dtype in (torch.float32, torch.float64):
            if backend == "reference" or dtype == torch.float32:
                found |= attention(backend, dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
