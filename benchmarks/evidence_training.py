"""Tables of the training benchmarks: kernels, steps, negatives, tables, exchange, schedules.

Touch this when a page about training shows another figure; evidence.py writes them.
"""

from benchmarks.evidence import Claim, ClaimTable, Column, EvidenceTable, RowTable


def at_most(
    bar: float,
    text: str,
    bench: str,
    name: str,
    form: str = ".2f",
    scale: float = 1.0,
    unit: str = "",
) -> Claim:
    """Return a claim that is held against a largest value."""
    return Claim(text, bench, name, form, scale, unit, bar, at_most=True)


def at_least(
    bar: float,
    text: str,
    bench: str,
    name: str,
    form: str = ".2f",
    scale: float = 1.0,
    unit: str = "",
) -> Claim:
    """Return a claim that is held against a smallest value."""
    return Claim(text, bench, name, form, scale, unit, bar)


PADDED = at_least(
    15.0,
    "ML-1M HSTU step against padded PyTorch, the same allocator on both sides",
    "train_step",
    "x_over_padded_ml1m",
    ".1f",
    1,
    "x",
)
NESTED_SHARE = at_least(
    0.90,
    "`nested` at NestPipe's shares, equal memory: share of what its lanes allow",
    "pipeline",
    "nested_bound_share",
    ".0f",
    100,
    " %",
)
NESTED_LATENCY = at_least(
    2.5,
    "`nested`, 1 or 2 steps ahead, against the plain loop, table slow by latency",
    "pipeline",
    "nested_speedup_latency",
    ".2f",
    1,
    "x",
)
SIX_STAGE_DEVICE = at_least(
    0.94,
    "`six_stage`: compute of the plain step / its step, emulated device",
    "pipeline",
    "compute_utilisation_emulated",
    ".1f",
    100,
    " %",
)
SIX_STAGE_CORES = Claim(
    "the same on two cores, which lanes and compute share",
    "pipeline",
    "compute_utilisation",
    ".1f",
    100,
    " %",
)
EXCHANGE_TIME = at_most(
    0.8,
    "Exchange of rows between two ranks: time over TorchRec's, keys deduplicated on both sides",
    "exchange",
    "time_vs_torchrec",
    ".2f",
    1,
    "x",
)
UPDATE = at_least(
    3.0,
    "Row-wise update against the fastest of plain indexing, SparseAdam and FBGEMM",
    "tables",
    "update_speedup",
    ".1f",
    1,
    "x",
)
MFU_LONG = at_least(
    0.55,
    "Whole training step of HSTU-long: share of the best matmul sample",
    "train_step",
    "mfu_hstu_long",
    ".0f",
    100,
    " %",
)
README_CLAIMS = (
    PADDED,
    MFU_LONG,
    Claim(
        "`nested` against the shipped loop at NestPipe's shares, equal memory",
        "pipeline",
        "nested_speedup",
        ".2f",
        1,
        "x",
    ),
    Claim("what its lanes allow there", "pipeline", "nested_bound", ".2f", 1, "x"),
    NESTED_SHARE,
    Claim(
        "the same where batches overlap more",
        "pipeline",
        "nested_bound_share_overlap",
        ".0f",
        100,
        " %",
    ),
    NESTED_LATENCY,
    SIX_STAGE_DEVICE,
    SIX_STAGE_CORES,
    EXCHANGE_TIME,
    UPDATE,
)

TRAINING_TABLES: dict[str, EvidenceTable] = {
    "auto-schedule": RowTable(
        "auto_schedule",
        (
            Column("setting: variant", "variant"),
            Column("step, ms", "step_ms", ".1f"),
            Column("spread %", "spread", ".0f", 100),
            Column("plain loop / it", "vs_plain", ".3f"),
            Column("chose at the end", "chosen"),
        ),
    ),
    "auto-schedule-claims": ClaimTable(
        (
            at_least(
                0.98,
                "`auto` against the plain loop, the worst of six settings",
                "auto_schedule",
                "worst_vs_plain",
                ".3f",
                1,
                "x",
            ),
            at_least(
                0.95,
                "`auto` against the best schedule set by hand, the worst of six",
                "auto_schedule",
                "worst_vs_best",
                ".3f",
                1,
                "x",
            ),
            Claim(
                "what two equal runs differ by, the most",
                "auto_schedule",
                "equal_runs_differ_by",
                ".1f",
                100,
                " %",
            ),
        )
    ),
    "balance-claims": ClaimTable(
        (
            at_most(
                0.01, "2 ranks, by predicted FLOPs", "balance", "imbalance_flops", ".2f", 100, " %"
            ),
            at_most(
                0.024, "64 ranks, by prediction", "balance", "imbalance_64_ranks", ".2f", 100, " %"
            ),
            at_most(
                0.024,
                "2 real ranks, by the clock",
                "balance",
                "imbalance_measured",
                ".2f",
                100,
                " %",
            ),
        )
    ),
    "before-after": RowTable(
        "before_after",
        (
            Column("", "variant"),
            Column("before, ms", "before_ms", ".1f"),
            Column("now, ms", "after_ms", ".1f"),
            Column("spread %", "spread", ".0f", 100),
            Column("speedup", "speedup", ".2f"),
            Column("`mfu` now", "mfu", ".2f"),
            Column("largest difference", "difference", ".1g"),
        ),
    ),
    "disk-table-claims": ClaimTable(
        (
            Claim("table, GB", "disk_table", "table_bytes", ".2f", 1e-9),
            Claim("`cache_bytes`, GB", "disk_table", "budget_bytes", ".2f", 1e-9),
            at_most(
                1.25 * 2**30,
                "resident memory above the start, GB",
                "disk_table",
                "resident_bytes",
                ".2f",
                1e-9,
            ),
            at_most(0.0, "rows lost on opening again", "disk_table", "rows_lost", ".0f"),
        )
    ),
    "exchange": RowTable(
        "exchange",
        (
            Column("", "variant"),
            Column("ranks", "ranks", "d"),
            Column("bytes to other ranks, per rank and step", "bytes_per_rank", ",d"),
            Column("ms a step", "ms_per_step", ".1f"),
            Column("spread %", "spread", ".0f", 100),
        ),
    ),
    "exchange-claims": ClaimTable(
        (
            EXCHANGE_TIME,
            Claim("bytes over the fewest of TorchRec's", "exchange", "bytes_vs_torchrec"),
            Claim("time over TorchRec's, repeated keys", "exchange", "time_vs_torchrec_duplicated"),
            at_most(0.0, "bytes less those of the formula", "exchange", "formula_error", ".0f"),
        )
    ),
    "kernels-claims": ClaimTable(
        (
            at_least(0.70, "attention with bias, 4 x 64, `mfu`", "kernels", "mfu_4x64_bias"),
            at_least(0.60, "attention with bias, 8 x 32, `mfu`", "kernels", "mfu_8x32_bias"),
            at_least(0.50, "attention with bias, 2 x 32, `mfu`", "kernels", "mfu_2x32_bias"),
            Claim("times faster than a loop over sequences", "kernels", "x_over_loop", ".1f"),
            Claim("times faster than padded PyTorch", "kernels", "x_over_padded", ".1f"),
        )
    ),
    "negatives-claims": ClaimTable(
        (
            at_least(
                0.8,
                "memory that segments save over gathered rows, the least",
                "negatives",
                "segmented_memory_saved",
                ".0f",
                100,
                " %",
            ),
            Claim(
                "step time in segments / gathered, the most", "negatives", "segmented_step_ratio"
            ),
            Claim("step time in segments / fused, the most", "negatives", "segmented_vs_fused"),
            at_most(1.15, "step time with k = 4 / k = 1", "negatives", "share_k4_step_ratio"),
            at_most(0.51, "bytes in 16 bits / in 32", "negatives", "fp16_bytes_ratio"),
            at_most(0.0, "more lookups by sharing", "negatives", "extra_lookups", ".0f"),
        )
    ),
    "pipeline": RowTable(
        "pipeline",
        (
            Column("setting: schedule", "variant"),
            Column("computed on", "device"),
            Column("step, ms", "step_ms", ",.0f"),
            Column("spread %", "spread", ".0f", 100),
            Column("speedup", "speedup", ".2f"),
            Column("bound", "bound", ".2f"),
            Column("of it %", "bound_share", ".0f", 100),
            Column("utilisation %", "utilisation", ".0f", 100),
            Column("exposed lookup %", "lookup", ".1f", 100),
            Column("exposed communication %", "comm", ".1f", 100),
            Column("processor ms", "cpu_ms", ",.0f"),
            Column("rows read", "reads", ",.0f"),
        ),
        keep=lambda row: "speedup" in row,
    ),
    "pipeline-claims": ClaimTable(
        (
            NESTED_SHARE,
            Claim(
                "the same on an emulated device",
                "pipeline",
                "nested_bound_share_emulated",
                ".0f",
                100,
                " %",
            ),
            Claim(
                "the same with 24 topics, where batches overlap more",
                "pipeline",
                "nested_bound_share_overlap",
                ".0f",
                100,
                " %",
            ),
            NESTED_LATENCY,
            Claim(
                "the same on an emulated device",
                "pipeline",
                "nested_speedup_latency_emulated",
                ".2f",
                1,
                "x",
            ),
            SIX_STAGE_DEVICE,
            SIX_STAGE_CORES,
            at_most(
                0.0,
                "uncut schedules against the plain loop: largest difference",
                "pipeline",
                "max_diff_uncut",
                ".1g",
            ),
            Claim("all exact schedules: largest difference", "pipeline", "max_diff", ".1g"),
            Claim("processor ms a step that `nested` adds", "pipeline", "lane_cpu_ms", ".0f"),
        )
    ),
    "tables": RowTable(
        "tables",
        (
            Column("", "variant"),
            Column("ns a row", "ns a row", ",.1f"),
            Column("spread %", "spread", ".0f", 100),
            Column("time over ours", "time over ours", ".2f"),
        ),
    ),
    "tables-claims": ClaimTable(
        (
            at_most(
                1.0,
                "gather over `index_select`, the worst of four",
                "tables",
                "gather_vs_index_select",
            ),
            UPDATE,
            Claim("over plain PyTorch indexing, the least of four", "tables", "update_vs_indexing"),
        )
    ),
    "train-step": RowTable(
        "train_step",
        (
            Column("step", "variant"),
            Column("tokens", "tokens", ",d"),
            Column("seconds", "seconds", ".3f"),
            Column("spread %", "spread", ".0f", 100),
            Column("`mfu`", "mfu", ".3f"),
            Column("by the median sample", "mfu_median_peak", ".3f"),
            Column("times ours", "x_over", ".1f"),
            Column("page faults", "page_faults", ",.0f"),
        ),
        keep=lambda row: "mfu" in row,
    ),
    "train-step-claims": ClaimTable(
        (
            PADDED,
            MFU_LONG,
            at_least(0.55, "FuXi-long, `mfu`", "train_step", "mfu_fuxi_long"),
            Claim(
                "memory that fused negatives save over gathered ones",
                "train_step",
                "negative_memory_saved",
                ".0f",
                100,
                " %",
            ),
        )
    ),
}
