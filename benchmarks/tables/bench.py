"""Embedding rows: gather and row-wise update against torch and FBGEMM, and cold rows from disk.

The table has 10M x 64 values. Keys are new in every repeat, so rows come from memory, not from a
cache; freed memory is kept, as in training, so that no variant pays for fresh pages.
`gather_vs_index_select` is the worst ratio over two orders of keys (ascending, as a batch's unique
keys are, and shuffled) and over torch's tensor in ordinary and in huge pages. `update_speedup`
compares like with like (Adam with SparseAdam, row-wise Adagrad with FBGEMM's, unique rows and whole
token gradients) and is the smallest of these ratios. FBGEMM is compared where it is installed. Cold
rows are read by threads, by one thread and through a memory map.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import peers as table_peers
from benchmarks.tables.cold_rows import ColdRows
from slipstream.bench import harness
from slipstream.ops.allocator import keep_freed_memory
from slipstream.ops.rows import coalesce, unique_keys
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdagrad, RowwiseAdam

DIM = 64
FULL, QUICK = (
    (10_000_000, 100_000, 9),
    (500_000, 20_000, 5),
)  # rows of the table, rows of a batch, repeats
DISK_FULL, DISK_QUICK = (2_000_000, 20_000, 5), (100_000, 2_000, 3)
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
    """The keys of every repeat, the same for all variants."""

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
            for _ in range(repeats + 1)
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
            # Rows of its own: it shares our memory, and must not find in the cache what we have
            # just fetched.
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


def _update(
    ours: MemoryTable,
    adam: MemoryTable,
    plain_ND: torch.Tensor,
    batches: Batches,
    repeats: int,
    count: int,
) -> tuple[list[harness.Row], float]:
    grads = batches.grads
    bag = table_peers.SparseAdamBag(plain_ND)
    fbgemm = table_peers.make_fbgemm(len(plain_ND), DIM)

    def from_tokens(table: MemoryTable, keys_T: torch.Tensor) -> None:
        unique_U, inverse_T = unique_keys(keys_T)
        table.apply(unique_U, coalesce(grads, inverse_T, unique_U.numel()), 0.1)

    ascending, tokens = batches.ascending, batches.tokens
    groups: dict[str, dict[str, Variant]] = {
        "Adam, unique rows": {
            "slipstream": lambda n: adam.apply(ascending[n], grads, 0.1),
            "EmbeddingBag + SparseAdam": lambda n: bag.step_rows(ascending[n], grads),
        },
        "Adam, token gradients": {
            "slipstream": lambda n: from_tokens(adam, tokens[n]),
            "EmbeddingBag + SparseAdam": lambda n: bag.step_tokens(tokens[n], grads),
        },
    }
    if fbgemm is not None:
        groups["Adagrad, unique rows"] = {
            "slipstream": lambda n: ours.apply(ascending[n], grads, 0.1),
            "FBGEMM": lambda n: fbgemm.step(ascending[n], grads),
        }
        groups["Adagrad, token gradients"] = {
            "slipstream": lambda n: from_tokens(ours, tokens[n]),
            "FBGEMM": lambda n: fbgemm.step(tokens[n], grads),
        }
    rows, ratios = [], []
    for group, variants in groups.items():
        samples = alternate(variants, repeats)
        rows += _rows(f"update {group}", samples, count, "slipstream")
        ratios += [
            harness.median(v) / harness.median(samples["slipstream"])
            for name, v in samples.items()
            if name != "slipstream"
        ]
    return rows, min(ratios)


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
    keep_freed_memory()
    num_rows, count, repeats = QUICK if quick else FULL
    batches = Batches(num_rows, count, repeats)
    ours = MemoryTable("item", num_rows, DIM, RowwiseAdagrad())
    plain_ND = ours.all_rows().clone()
    rows, gather_ratio = _gather(ours, plain_ND, batches, repeats)
    adam = MemoryTable("item", num_rows, DIM, RowwiseAdam())
    adam.all_rows()
    more, speedup = _update(ours, adam, plain_ND, batches, repeats, count)
    del ours, adam, plain_ND
    disk_rows, disk_claims = _disk(*(DISK_QUICK if quick else DISK_FULL))
    claims = {"gather_vs_index_select": gather_ratio, "update_speedup": speedup, **disk_claims}
    return harness.finish("tables", rows + more + disk_rows, claims, json_path)
