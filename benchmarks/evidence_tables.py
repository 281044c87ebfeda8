"""What the tables of README and docs show, by the name that a page marks.

Touch this when a page shows other columns of a result; evidence.py writes them. Tables of kernels,
steps, tables and schedules are in evidence_training.py; arena, reproduce and simulate keep theirs.
"""

from typing import Any

from benchmarks.arena.evidence_tables import ARENA_TABLES
from benchmarks.evidence import Claim, ClaimTable, Column, EvidenceTable, RowTable
from benchmarks.evidence_training import README_CLAIMS, TRAINING_TABLES, at_most
from benchmarks.reproduce.evidence_tables import REPRODUCE_TABLES
from benchmarks.simulate.evidence_tables import SIMULATE_TABLES

SERVED = {
    "relay": "relay, as shipped",
    "W1": "in line, 2 x 1 thread",
    "W2": "in line, 1 x 2 threads",
    "W3": "prefixes kept, nothing ahead",
    "W4": "in line, newest 256",
}
TABLES: dict[str, EvidenceTable] = {
    **TRAINING_TABLES,
    **SIMULATE_TABLES,
    **ARENA_TABLES,
    **REPRODUCE_TABLES,
    "attack-claims": ClaimTable(
        (
            Claim("attempts refused", "attack", "refused", ".4f", bar=1.0),
            at_most(1.2, "p99 of honest users, attacked over quiet", "attack", "p99_ratio_honest"),
            at_most(1.25, "the router's memory, attacked over before", "attack", "memory_ratio"),
            at_most(0.0, "wrong scores", "attack", "wrong_scores", ".0f"),
            at_most(0.0, "honest requests that failed", "attack", "failed_honest", ".0f"),
            Claim(
                "the attackers' share of the cores", "attack", "attackers_share", ".1f", 100, " %"
            ),
        )
    ),
    "chaos": RowTable(
        "chaos",
        (
            Column("event", "variant"),
            Column("count", "count", ",d"),
            Column("", ""),
        ),
    ),
    "chaos-claims": ClaimTable(
        (
            at_most(0.0, "wrong scores", "chaos", "wrong_scores", ".0f"),
            at_most(0.0, "admitted requests lost", "chaos", "lost_admitted", ".0f"),
            at_most(5.0, "longest recovery", "chaos", "recovery_seconds", ".1f", 1, " s"),
            at_most(0.0, "failures that nothing explains", "chaos", "unexplained_failures", ".0f"),
        )
    ),
    "checkpoint": RowTable(
        "checkpoint",
        (
            Column("checkpoint", "variant"),
            Column("draws", lambda row: row.get("draws", "")),
            Column("seconds it costs", "cost_s", ".1f"),
            Column("of which the loop waits", lambda row: row.get("blocked_s"), ".2f"),
            Column("GB written", "bytes", ".2f", 1e-9),
        ),
    ),
    "checkpoint-claims": ClaimTable(
        (
            at_most(
                0.03,
                "share of the training time, uniform draws",
                "checkpoint",
                "cost_share",
                ".2f",
                100,
                " %",
            ),
            Claim("the same, popular draws", "checkpoint", "cost_share_popular", ".2f", 100, " %"),
        )
    ),
    "checkpoint-first-rule": RowTable(
        "checkpoint_first_rule",
        (
            Column("checkpoint", lambda row: row["variant"] + (", folded" * row.get("folded", 0))),
            Column("seconds it costs", "cost_s", ".1f"),
            Column("of which the loop waits", lambda row: row.get("blocked_s"), ".1f"),
            Column("GB written", "bytes", ".2f", 1e-9),
        ),
    ),
    "full-recipes": RowTable(
        "full_recipes",
        (
            Column("recipe", lambda row: f"`{row['variant']}`"),
            Column("tokens a step", "token budget"),
            Column("s a step", "s a step", ".1f"),
            Column("peak GB", "peak GB", ".1f"),
            Column("loss", "loss", ".2f"),
            Column("failure", lambda row: row["failure"] or "none"),
        ),
    ),
    "hit": RowTable(
        "hit",
        (
            Column("what is timed", "variant"),
            Column("behaviours", "behaviours", ",d"),
            Column("ms", "ms", ".2f"),
            Column("spread %", "spread", ".0f", 100),
        ),
    ),
    "hit-claims": ClaimTable(
        (
            at_most(9.0, "a hit over HTTP, 1,024 behaviours, ms", "hit", "hit_ms_1024"),
            at_most(5.0, "the engine alone, ms", "hit", "engine_ms_1024"),
            at_most(1.8, "the first over the second", "hit", "hit_vs_engine_1024"),
            at_most(12.0, "a hit over HTTP, 2,048 behaviours, ms", "hit", "hit_ms_2048"),
            Claim("largest difference of a score", "hit", "score_diff", ".1e"),
        )
    ),
    "kv-precision-claims": ClaimTable(
        tuple(
            Claim(text.format(kind), "kv_precision", name.format(kind), form)
            for text, name, form in (
                ("prefixes of 1,024 behaviours in a gigabyte, {}", "prefixes_per_gb_{}", ",.0f"),
                ("ranking behind one, {}, ms", "hit_ms_{}", ".2f"),
                ("largest difference of a score to fp32's, {}", "score_diff_{}", ".1e"),
            )
            for kind in ("fp32", "fp16", "int8")
            if not (kind == "fp32" and "score_diff" in name)
        )
    ),
    "large-catalogue": RowTable(
        "large_catalogue",
        (
            Column("command", "variant"),
            Column("held MB", "held MB", ",.0f"),
            Column("mapped MB", "mapped MB", ",.0f"),
            Column("s", "seconds", ",.0f"),
        ),
    ),
    "page-speed-claims": ClaimTable(
        (
            at_most(1_000, "first paint, ms", "page_speed", "first_paint_ms", ".0f"),
            Claim("a click answered, median, ms", "page_speed", "interaction_ms", ".0f"),
            at_most(200, "the slowest of 21 clicks, ms", "page_speed", "interaction_ms_max", ".0f"),
            at_most(
                200,
                "200 behaviours explained, over HTTP, median, ms",
                "page_speed",
                "explain_ms_200",
                ".0f",
            ),
            Claim("the slowest of 20 explanations, ms", "page_speed", "explain_ms_200_max", ".0f"),
        )
    ),
    "readme": ClaimTable(
        (
            *README_CLAIMS,
            at_most(
                9.0,
                "Ranking behind a cached prefix of 1,024 behaviours, over HTTP",
                "hit",
                "hit_ms_1024",
                ".1f",
                1,
                " ms",
            ),
            Claim(
                "Requests a second within 80 ms over the best in line, 384 to 1,024 behaviours",
                "serving",
                "slo_qps_ratio",
                ".2f",
                1,
                "x",
                bar=2.0,
            ),
            *(
                Claim(text, "serving", name, ".1f")
                for text, name in (
                    (
                        "Requests a second within 80 ms, 2,048 behaviours, relay",
                        "slo_qps_long_2048",
                    ),
                    ("the same, ranked in line", "slo_qps_long_2048_inline"),
                )
            ),
            Claim(
                "Longest history within 80 ms at 10 requests a second, over in line",
                "serving",
                "max_prefix_ratio",
                ".2f",
                1,
                "x",
                bar=2.0,
            ),
            at_most(
                15.0,
                "The 100 best of a million items, exact, one core, beyond the prefill",
                "recommend",
                "ms_1m",
                ".1f",
                1,
                " ms",
            ),
            at_most(
                2e9,
                "20 M x 64 items on disk: memory that evaluation holds, the most of all commands",
                "large_catalogue",
                "resident_evaluate",
                ".2f",
                1e-9,
                " GB",
            ),
            at_most(
                0.03,
                "Checkpoints of a 10 GB table: share of the training time",
                "checkpoint",
                "cost_share",
                ".1f",
                100,
                " %",
            ),
            at_most(
                0.0,
                "Kills, hangs, reloads, full disk, lost store under load: wrong scores",
                "chaos",
                "wrong_scores",
                ".0f",
            ),
            at_most(
                1.2,
                "p99 of honest users under attack, over their p99 without",
                "attack",
                "p99_ratio_honest",
                ".2f",
                1,
                "x",
            ),
            Claim(
                "Simulated, in NestPipe's setting: efficiency of 1,536 workers over 128",
                "simulate",
                "efficiency_1536",
                ".1f",
                100,
                " %",
                bar=0.9717,
            ),
        ),
        only_recorded=True,
    ),
    "recommend-claims": ClaimTable(
        (
            Claim("equal to brute force (1: every query)", "recommend", "topk_equal", ".0f", bar=1),
            at_most(
                15.0, "100 best of a million beyond the prefill, ms", "recommend", "ms_1m", ".1f"
            ),
            at_most(2e9, "ten million items, resident GB", "recommend", "bytes_10m", ".2f", 1e-9),
            *(
                Claim(
                    f"p99 of `/v1/recommend`, bundles: {bundles}, {trace}, {how}, ms",
                    "recommend",
                    f"p99_{bundles}_{trace}_{name}",
                    ".1f",
                )
                for bundles in ("one", "two")
                for trace in ("sessions", "once")
                for how, name in (("relay", "relay"), ("in line", "inline"))
            ),
        )
    ),
    "serving": RowTable(
        "serving",
        (
            Column("requests", lambda row: _traffic(row)),
            Column("served", lambda row: SERVED[row["variant"]]),
            Column(
                "a second within 80 ms",
                lambda row: f"{row['slo_qps']:.1f}" if row["slo_qps"] else "none",
            ),
            Column("of its ideal queue, %", lambda row: row.get("of_ideal"), ".0f", 100),
            Column("over the best in line", lambda row: row.get("over_inline"), ".2f"),
        ),
    ),
    "ranking": RowTable(
        "ranking",
        (
            Column("", lambda row: {"slipstream": "**slipstream**", "din": "DIN"}[row["variant"]]),
            Column("AUC", "AUC", ".4f"),
            Column("±", "sd AUC", ".4f"),
            Column("GAUC", "GAUC", ".4f"),
            *(
                Column(f"AUC, {task.replace('_', ' ')}", f"AUC/{task}", ".4f")
                for task in ("click", "like", "long_view")
            ),
            Column("best epoch", "best_epoch", ".0f"),
            Column("training, s", "seconds", ".0f"),
            Column("GB", "peak_bytes", ".2f", 1e-9),
        ),
    ),
    "serving-claims": ClaimTable(
        (
            *(
                Claim(text, "serving", name, form, 1, "x", bar)
                for text, name, form, bar in (
                    ("relay over in line, sessions, mean", "slo_qps_ratio", ".2f", 2.0),
                    ("the same, the largest of five lengths", "slo_qps_ratio_max", ".2f", 3.6),
                    ("every user once, 1,024", "slo_qps_ratio_no_reuse", ".2f", 1.4),
                    ("every user once, the smallest", "slo_qps_ratio_no_reuse_min", ".2f", 1.0),
                    ("over keeping prefixes alone", "slo_qps_ratio_keep", ".2f", None),
                    ("longest history at 10 a second", "max_prefix_ratio", ".2f", 2.0),
                )
            ),
            *(
                Claim(
                    f"requests a second, {length:,} behaviours, {served}",
                    "serving",
                    f"slo_qps_long_{length}{ending}",
                    ".1f",
                )
                for length in (2_048, 3_072)
                for served, ending in (("relay", ""), ("in line", "_inline"))
            ),
            *(
                Claim(text, "serving", name, ".0f", 100, " %", 0.8)
                for text, name in (
                    ("in line, of its ideal queue, at worst", "baseline_vs_ideal"),
                    ("relay, of its ideal queue, at worst", "relay_vs_ideal"),
                )
            ),
            Claim("share within the limit, with / without the trigger", "serving", "trigger_gain"),
            Claim("the same, host tier", "serving", "expander_gain"),
            Claim("`/v1/recommend`, p99, ms", "serving", "recommend_p99_ms", ".1f"),
            Claim("the same, in line", "serving", "recommend_p99_ms_without", ".1f"),
            Claim("largest difference of a score", "serving", "score_diff", ".1e"),
            at_most(120, "minutes of the whole", "serving", "minutes", ".0f"),
        )
    ),
}


def _traffic(row: dict[str, Any]) -> str:
    """Say which requests a row of the serving benchmark stands for."""
    users = "sessions" if row["trace"] == "S" else "every user once"
    length = row["length"]
    return f"{users}, {length}" + (" behaviours" if length.isdigit() else "")
