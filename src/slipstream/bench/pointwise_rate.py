"""Losses, row operators, norm and gate against plain PyTorch, at the sizes of an ML-1M step.

Forward and backward together, variants interleaved, medians. The ratios are the claim; absolute
times describe this machine. Both sides run under training's allocator, and only operators that a
shipped model or table calls are compared. Touch this when an operator other than attention is
added.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from slipstream.bench.harness import describe, interleave, set_training_allocator
from slipstream.files import write_json
from slipstream.ops import losses, native, pointwise, rows

Step = Callable[[], Any]
REPEATS, QUICK_REPEATS = 9, 5
TOKENS, QUICK_TOKENS = 16_000, 2_000
WIDTH, CATALOGUE, NEGATIVES, TABLE_ROWS = 50, 3_400, 128, 1_000_000
OURS, PLAIN = "slipstream", "plain torch"


def _stepping(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Step:
    """Return a step: forward and backward of a function of differentiable inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    upstream = torch.rand_like(function(*leaves).detach())

    def step() -> None:
        torch.autograd.grad(function(*leaves), leaves, upstream)

    return step


def _losses(tokens: int) -> dict[str, dict[str, Step]]:
    hidden_TD, rows_UD = torch.randn(tokens, WIDTH), torch.randn(CATALOGUE, WIDTH) * 0.3
    targets_T, negatives_TR = (
        torch.randint(CATALOGUE, (tokens,)),
        torch.randint(CATALOGUE, (tokens, NEGATIVES)),
    )

    def gathered(h_TD: torch.Tensor, r_UD: torch.Tensor) -> torch.Tensor:
        candidates = torch.cat([targets_T.unsqueeze(1), negatives_TR], dim=1)
        logits = torch.einsum("td,trd->tr", h_TD, r_UD[candidates])
        collides = F.pad(negatives_TR == targets_T.unsqueeze(1), (1, 0))
        return F.cross_entropy(
            logits.masked_fill(collides, float("-inf")),
            torch.zeros_like(targets_T),
            reduction="none",
        )

    return {
        "sampled_softmax": {
            OURS: _stepping(
                lambda h, r: losses.sampled_softmax_loss(h, r, targets_T, negatives_TR),
                hidden_TD,
                rows_UD,
            ),
            PLAIN: _stepping(gathered, hidden_TD, rows_UD),
        },
        "full_softmax": {
            OURS: _stepping(
                lambda h, r: losses.full_softmax_loss(h, r, targets_T), hidden_TD, rows_UD
            ),
            PLAIN: _stepping(
                lambda h, r: F.cross_entropy(h @ r.T, targets_T, reduction="none"),
                hidden_TD,
                rows_UD,
            ),
        },
    }


def _pointwise(tokens: int) -> dict[str, dict[str, Step]]:
    x_TD, gate_TD, weight_FD = (
        torch.randn(tokens, WIDTH),
        torch.randn(tokens, WIDTH),
        torch.randn(4 * WIDTH, WIDTH) * 0.1,
    )
    names_T = torch.arange(tokens)
    return {
        "linear_silu": {
            OURS: _stepping(pointwise.linear_silu, x_TD, weight_FD),
            PLAIN: _stepping(lambda x, w: F.silu(F.linear(x, w)), x_TD, weight_FD),
        },
        "norm_gate_dropout": {
            OURS: _stepping(
                lambda x, g: pointwise.norm_gate_dropout(x, g, p=0.2, seed=1, token_ids_T=names_T),
                x_TD,
                gate_TD,
            ),
            PLAIN: _stepping(
                lambda x, g: F.dropout(F.layer_norm(x, (WIDTH,), eps=1e-6) * g, 0.2), x_TD, gate_TD
            ),
        },
        "dropout": {
            OURS: _stepping(
                lambda x: pointwise.dropout(x, p=0.2, seed=1, token_ids_T=names_T), x_TD
            ),
            PLAIN: _stepping(lambda x: F.dropout(x, 0.2), x_TD),
        },
        "rms_norm": {
            OURS: _stepping(pointwise.rms_norm, x_TD),
            PLAIN: _stepping(lambda x: F.rms_norm(x, (WIDTH,), eps=1e-6), x_TD),
        },
    }


def _rows(tokens: int) -> dict[str, dict[str, Step]]:
    keys_T = torch.randint(CATALOGUE, (tokens * (NEGATIVES + 1),))
    weights_ND, state_N = torch.randn(TABLE_ROWS, 64), torch.zeros(TABLE_ROWS)
    touched_T, grads_TD = (torch.rand(tokens) ** 3 * TABLE_ROWS).long(), torch.randn(tokens, 64)
    index_T, rows_UD = torch.randint(CATALOGUE, (tokens,)), torch.randn(CATALOGUE, WIDTH)

    @torch.no_grad()
    def sorted_update() -> None:
        sorted_T, order_T = torch.sort(touched_T)
        rows_U, inverse_T = torch.unique_consecutive(sorted_T, return_inverse=True)
        grads_UD = grads_TD.new_zeros(rows_U.numel(), 64).index_add_(
            0, inverse_T, grads_TD[order_T]
        )
        state_U = state_N[rows_U] + grads_UD.square().mean(dim=1)
        state_N[rows_U] = state_U
        weights_ND[rows_U] -= 0.1 * grads_UD / (state_U.sqrt() + 1e-8).unsqueeze(1)

    def our_update() -> None:
        rows_U, inverse_T = rows.unique_keys(touched_T)
        grads_UD = rows.coalesce(grads_TD, inverse_T, rows_U.numel())
        rows.rowwise_adagrad_(weights_ND, state_N, rows_U, grads_UD, lr=0.1, eps=1e-8)

    return {
        "unique_keys": {
            OURS: lambda: rows.unique_keys(keys_T),
            PLAIN: lambda: torch.unique(keys_T, return_inverse=True),
        },
        "take_rows": {
            OURS: _stepping(lambda r: rows.take_rows(r, index_T), rows_UD),
            PLAIN: _stepping(lambda r: r[index_T], rows_UD),
        },
        "rowwise_adagrad": {
            OURS: our_update,
            PLAIN: sorted_update,
        },
    }


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table, write the JSON if a path is given."""
    tokens, repeats = (QUICK_TOKENS, QUICK_REPEATS) if quick else (TOKENS, REPEATS)
    torch.manual_seed(0)
    freed_memory = set_training_allocator()
    found, claims = [], {}
    for group in (_losses, _pointwise, _rows):
        for operator, variants in group(tokens).items():
            samples = interleave(variants, repeats=repeats)
            middle = {name: median(values) for name, values in samples.items()}
            claims[f"{operator}_speedup"] = middle[PLAIN] / middle[OURS]
            for name, values in samples.items():
                spread = (max(values) - min(values)) / middle[name]
                found.append(
                    {
                        "operator": operator,
                        "variant": name,
                        "seconds": middle[name],
                        "spread": spread,
                        "samples": values,
                    }
                )
    result = describe("pointwise") | {
        "freed_memory": freed_memory,
        "native": native.status(),
        "sizes": {
            "tokens": tokens,
            "width": WIDTH,
            "catalogue": CATALOGUE,
            "negatives": NEGATIVES,
            "table_rows": TABLE_ROWS,
        },
        "rows": found,
        "claims": claims,
    }
    _print(result)
    if json_path is not None:
        write_json(json_path, result)
    return result


def _print(result: dict[str, Any]) -> None:
    sizes, threads = result["sizes"], result["threads"]
    table = Table(
        title=f"{sizes['tokens']:,} tokens, {threads} thread(s), {result['native']}",
        title_justify="left",
    )
    for heading in ("operator", "variant", "ms", "spread", "speed-up"):
        table.add_column(heading, justify="left" if heading in ("operator", "variant") else "right")
    for row in result["rows"]:
        ratio = (
            f"{result['claims'][row['operator'] + '_speedup']:.2f}x"
            if row["variant"] == OURS
            else ""
        )
        table.add_row(
            row["operator"],
            row["variant"],
            f"{1e3 * row['seconds']:.2f}",
            f"{row['spread']:.0%}",
            ratio,
        )
    Console(highlight=False).print(table)
