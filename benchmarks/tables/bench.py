"""Embedding rows: gather and row-wise update against torch and FBGEMM, and cold rows from disk.

The table has 10M x 64 values. Keys are new in every repeat, so rows come from memory, not from a
cache; freed memory is kept, as in training, so that no variant pays for fresh pages.
`gather_vs_index_select` is the worst ratio over two orders of keys (ascending, as a batch's unique
keys are, and shuffled) and over torch's tensor in ordinary and in huge pages. `update_speedup`
compares like with like (Adam with SparseAdam, row-wise Adagrad with FBGEMM's, both with plain
PyTorch indexing; unique rows, and token gradients with the time of their deduplication on all
sides) and is the smallest of these ratios. FBGEMM is compared where it is installed. Cold rows are
read by threads, by one thread and through a memory map. Touch this when a table reads or updates
rows in another way.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import peers as table_peers
from benchmarks.tables.cold_rows import ColdRows
from slipstream.bench import harness
from slipstream.ops.rows import coalesce, unique_keys
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdagrad, RowwiseAdam

DIM = 64
FULL, QUICK = (
    (10_000_000, 100_000, 9),
    (500_000, 20_000, 5),
)  # rows of the table, rows of a batch, repeats
DISK_FULL, DISK_QUICK = (2_000_000, 20_000, 5), (100_000, 2_000, 3)
INDEXING, SPARSE_ADAM = "plain PyTorch indexing", "EmbeddingBag + SparseAdam"
Variant = Callable[[int], object]  # takes the number of the repeat
Samples = dict[str, list[float]]


def alternate(
    variants: Mapping[str, Variant],
    repeats: int,
    prepare: Mapping[str, Callable[[], None]] | None = None,
) -> Samples:
    """Time every variant in turns; repeat 0 warms up and does not count.

    `prepare` runs before each, outside the clock.
    """
    samples: Samples = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, function in variants.items():
            if prepare is not None:
                prepare[name]()
            begin = time.perf_counter()
            function(repeat)
            if repeat:
                samples[name].append(time.perf_counter() - begin)
    return samples


def _rows(group: str, samples: Samples, count: int, base: str) -> list[harness.Row]:
    basis = harness.median(samples[base])
    return [
        {
            "variant": f"{group}: {name}",
            "ns a row": 1e9 * harness.median(values) / count,
            "spread": harness.spread(values),
            "time over ours": harness.median(values) / basis,
            "samples": values,
        }
        for name, values in samples.items()
    ]


class Batches:
    """The keys of every repeat, the same for all variants.

    There are twice as many as repeats: two variants that share a tensor take different halves, so
    that none finds in the cache what the other has just fetched.
    """

    def __init__(self, num_rows: int, count: int, repeats: int) -> None:
        generator = torch.Generator().manual_seed(0)
        more = int(count * (1 + 2 * count / num_rows)) + 100
        drawn = [
            torch.randint(num_rows, (more,), generator=generator).unique()
            for _ in range(2 * repeats + 2)
        ]
        self.shuffled = [
            keys[torch.randperm(len(keys), generator=generator)][:count] for keys in drawn
        ]
        self.ascending = [keys.sort().values for keys in self.shuffled]
        self.tokens = [
            (torch.rand(count, generator=generator).pow(4) * num_rows).long()
            for _ in range(2 * repeats + 2)
        ]
        self.grads = torch.randn(count, DIM, generator=generator)


def _gather(
    ours: MemoryTable, plain_ND: torch.Tensor, batches: Batches, repeats: int
) -> tuple[list[harness.Row], float]:
    rows, ratios, huge_ND = [], [], ours.weights_ND
    for order, keys in (("ascending", batches.ascending), ("shuffled", batches.shuffled)):
        variants: dict[str, Variant] = {
            "slipstream": partial(lambda keys, n: ours.gather(keys[n]), keys),
            "index_select": partial(lambda keys, n: plain_ND.index_select(0, keys[n]), keys),
            "index_select, huge pages": partial(
                lambda keys, n: huge_ND.index_select(0, keys[n + repeats + 1]), keys
            ),
        }
        samples = alternate(variants, repeats)
        rows += _rows(f"gather {order}", samples, len(keys[0]), "slipstream")
        ratios += [
            harness.median(samples["slipstream"]) / harness.median(v)
            for name, v in samples.items()
            if name != "slipstream"
        ]
    return rows, max(ratios)


def _adagrad(
    ours: MemoryTable, plain_ND: torch.Tensor, batches: Batches
) -> dict[str, dict[str, Variant]]:
    """Return the variants of row-wise Adagrad, by group."""
    grads, ascending, tokens = batches.grads, batches.ascending, batches.tokens
    plain, fbgemm = table_peers.PlainIndexing(plain_ND), table_peers.make_fbgemm(*plain_ND.shape)
    groups: dict[str, dict[str, Variant]] = {
        "Adagrad, unique rows": {
            "slipstream": lambda n: ours.apply(ascending[n], grads, table_peers.LR),
            INDEXING: lambda n: plain.adagrad(ascending[n], grads),
        },
        "Adagrad, token gradients": {
            "slipstream": lambda n: _from_tokens(ours, tokens[n], grads),
            INDEXING: lambda n: plain.adagrad(*plain.deduplicated(tokens[n], grads)),
        },
    }
    if fbgemm is not None:
        groups["Adagrad, unique rows"]["FBGEMM"] = lambda n: fbgemm.step(ascending[n], grads)
        groups["Adagrad, token gradients"]["FBGEMM"] = lambda n: fbgemm.step(tokens[n], grads)
    return groups


def _adam(
    ours: MemoryTable, plain_ND: torch.Tensor, batches: Batches, repeats: int
) -> dict[str, dict[str, Variant]]:
    """Return the variants of Adam, by group; the two peers share a tensor, not its rows."""
    grads, ascending, tokens = batches.grads, batches.ascending, batches.tokens
    plain, bag, other = (
        table_peers.PlainIndexing(plain_ND),
        table_peers.SparseAdamBag(plain_ND),
        repeats + 1,
    )
    return {
        "Adam, unique rows": {
            "slipstream": lambda n: ours.apply(ascending[n], grads, table_peers.LR),
            INDEXING: lambda n: plain.adam(ascending[n + other], grads),
            SPARSE_ADAM: lambda n: bag.step_rows(ascending[n], grads),
        },
        "Adam, token gradients": {
            "slipstream": lambda n: _from_tokens(ours, tokens[n], grads),
            INDEXING: lambda n: plain.adam(*plain.deduplicated(tokens[n + other], grads)),
            SPARSE_ADAM: lambda n: bag.step_tokens(tokens[n], grads),
        },
    }


def _from_tokens(table: MemoryTable, keys_T: torch.Tensor, grads_TD: torch.Tensor) -> None:
    """Update a table from token gradients as training does, deduplication included."""
    unique_U, inverse_T = unique_keys(keys_T)
    table.apply(unique_U, coalesce(grads_TD, inverse_T, unique_U.numel()), table_peers.LR)


def _update(
    groups: Mapping[str, Mapping[str, Variant]], repeats: int, count: int
) -> tuple[list[harness.Row], dict[str, list[float]]]:
    """Time every group; return its rows, and each peer's times over ours."""
    rows: list[harness.Row] = []
    ratios: dict[str, list[float]] = {}
    for group, variants in groups.items():
        samples = alternate(variants, repeats)
        rows += _rows(f"update {group}", samples, count, "slipstream")
        for name, values in samples.items():
            if name != "slipstream":
                ratio = harness.median(values) / harness.median(samples["slipstream"])
                ratios.setdefault(name, []).append(ratio)
    return rows, ratios


def update_claims(ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the smallest ratio over all peers and groups, and the one over plain indexing."""
    return {
        "update_speedup": min(min(each) for each in ratios.values()),
        "update_vs_indexing": min(ratios[INDEXING]),
    }


def _disk(num_rows: int, count: int, repeats: int) -> tuple[list[harness.Row], dict[str, float]]:
    # Beside the working directory, not in the system's temporary one: that may live in memory.
    with tempfile.TemporaryDirectory(prefix=".slipstream-bench-", dir=os.getcwd()) as directory:
        cold = ColdRows(Path(directory), num_rows, DIM)
        batches = [
            torch.randperm(num_rows, generator=torch.Generator().manual_seed(n))[:count]
            for n in range(repeats + 1)
        ]
        variants: dict[str, Variant] = {
            "16 reading threads": lambda n: cold.read(batches[n], 16),
            "one thread": lambda n: cold.read(batches[n], 1),
            "mmap": lambda n: cold.read_mapped(batches[n]),
        }
        samples = alternate(variants, repeats, dict.fromkeys(variants, cold.drop_caches))
        cold.check(batches[0])
        cold.close()
    middle = {name: harness.median(values) for name, values in samples.items()}
    claims = {
        f"disk_{name}_over_threads": middle[key] / middle["16 reading threads"]
        for name, key in (("one", "one thread"), ("mmap", "mmap"))
    }
    return _rows(f"cold disk, {count:,} rows", samples, count, "16 reading threads"), claims


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table, write the JSON if a path is given."""
    harness.set_training_allocator()
    num_rows, count, repeats = QUICK if quick else FULL
    batches = Batches(num_rows, count, repeats)
    ours = MemoryTable("item", num_rows, DIM, RowwiseAdagrad(table_peers.EPS))
    plain_ND = ours.all_rows().clone()
    rows, gather_ratio = _gather(ours, plain_ND, batches, repeats)
    more, ratios = _update(_adagrad(ours, plain_ND, batches), repeats, count)
    rows += more
    del ours  # all tables of both optimizers together would need 20 GB
    adam = MemoryTable("item", num_rows, DIM, RowwiseAdam(table_peers.BETAS, table_peers.EPS))
    adam.all_rows()
    more, adam_ratios = _update(_adam(adam, plain_ND, batches, repeats), repeats, count)
    rows += more
    del adam, plain_ND
    for peer, found in adam_ratios.items():
        ratios.setdefault(peer, []).extend(found)
    disk_rows, disk_claims = _disk(*(DISK_QUICK if quick else DISK_FULL))
    claims = {"gather_vs_index_select": gather_ratio, **update_claims(ratios), **disk_claims}
    return harness.finish("tables", rows + disk_rows, claims, json_path)
