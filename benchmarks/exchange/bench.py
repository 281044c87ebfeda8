"""Bytes and time per step of the key, row and gradient exchange, against TorchRec.

Two ranks over gloo on the loopback, one thread each, the same Zipf ids: route, gather, answer,
spread to tokens, backward, gradients to the owners, row-wise Adagrad. TorchRec's
EmbeddingCollection does the same work row-wise sharded with FBGEMM's fused update (torchrec 1.8.0
with fbgemm-gpu-cpu 1.8.0). It gets keys deduplicated inside the clock, as we do: by torch.unique,
and by our own operators; the claims are against the better of them. Its own index dedup is measured
where its kernels run on a CPU, repeated keys are shown beside. Four ranks in 2 x 2 replicas against
four in one group show what hierarchical replicas save of the all-to-all. Bytes are counted at
torch's collectives and compared with the formula: per rank 8 bytes per key and twice dim x 4 bytes
per row for what crosses ranks. Touch this when another peer or mesh should be compared.
"""

import importlib.util
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.exchange.ranks import REPEATED, Setting
from benchmarks.local_ranks import run_ranks
from slipstream.bench.harness import Row, finish, median, spread
from slipstream.errors import SlipstreamError

QUICK = Setting(rows=100_000, tokens=4_000, repeats=5)


def launch(setting: Setting, world: int, work: str) -> list[dict[str, Any]]:
    """Run the ranks and return their figures."""
    with tempfile.TemporaryDirectory(prefix="slipstream-exchange-") as scratch:
        arguments = [str(world), str(Path(scratch) / "meeting"), json.dumps(asdict(setting)), work]
        return run_ranks(
            "benchmarks.exchange.ranks",
            arguments,
            world=world,
            seconds_allowed=setting.seconds_allowed,
        )["ranks"]


def peer_rows(ranks: list[dict[str, Any]]) -> tuple[list[Row], dict[str, float]]:
    """Return a row per variant, and the claims against the best TorchRec variant.

    A step lasts until its slowest rank has ended. Claims that end with `duplicated` are the rule
    before: against TorchRec with repeated keys.
    """
    rows: list[Row] = []
    for name in ranks[0]["rows"]:
        seconds = [
            max(each)
            for each in zip(*(rank["rows"][name]["seconds"] for rank in ranks), strict=True)
        ]
        sent = [
            sum(each) / len(ranks)
            for each in zip(*(rank["rows"][name]["bytes"] for rank in ranks), strict=True)
        ]
        rows.append(
            {
                "variant": name,
                "ranks": len(ranks),
                "ms_per_step": 1e3 * median(seconds),
                "spread": spread(seconds),
                "bytes_per_rank": round(median(sent)),
                "samples": seconds,
            }
        )
    by_name = {row["variant"]: row for row in rows}
    peers = [row for name, row in by_name.items() if name.startswith("torchrec")]
    ours, repeated = by_name["slipstream"], by_name[REPEATED]
    claims = {
        "bytes_vs_torchrec": ours["bytes_per_rank"] / min(row["bytes_per_rank"] for row in peers),
        "time_vs_torchrec": ours["ms_per_step"] / min(row["ms_per_step"] for row in peers),
        "bytes_vs_torchrec_duplicated": ours["bytes_per_rank"] / repeated["bytes_per_rank"],
        "time_vs_torchrec_duplicated": ours["ms_per_step"] / repeated["ms_per_step"],
        "max_diff": max(rank["max_diff"] for rank in ranks),
        "formula_error": float(max(rank["formula_error"] for rank in ranks)),
        "fp16_row_error": max(rank["transport"]["rows"]["relative"] for rank in ranks),
        "fp16_gradient_error": max(rank["transport"]["gradients"]["relative"] for rank in ranks),
    }
    return rows, claims


def replica_rows(ranks: list[dict[str, Any]]) -> tuple[list[Row], dict[str, float]]:
    """Compare all-to-all bytes of four ranks, flat and in replicas.

    The group sizes predict (1/2) / (3/4) = 2/3.
    """
    rows: list[Row] = []
    for mesh, name in (("auto", "slipstream, 4 ranks flat"), ("2x2", "slipstream, 2 x 2 replicas")):
        figures = {
            key: median([median(rank[mesh][key]) for rank in ranks])
            for key in ("all_to_all", "replica_lists")
        }
        rows.append(
            {
                "variant": name,
                "ranks": len(ranks),
                "bytes_per_rank": round(figures["all_to_all"]),
                "replica_bytes_per_rank": round(figures["replica_lists"]),
                "samples": ranks[0][mesh]["all_to_all"],
            }
        )
    error = max(rank[mesh]["formula_error"] for rank in ranks for mesh in ("auto", "2x2"))
    return rows, {
        "hsp_bytes_ratio": rows[1]["bytes_per_rank"] / rows[0]["bytes_per_rank"],
        "hsp_formula_error": float(error),
    }


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table, write the JSON if a path is given."""
    if (
        importlib.util.find_spec("torchrec") is None
        or importlib.util.find_spec("fbgemm_gpu") is None
    ):
        raise SlipstreamError(
            "bench exchange compares with TorchRec, which is not installed; run 'make peers'"
        )
    setting = QUICK if quick else Setting()
    rows, claims = peer_rows(launch(setting, 2, "torchrec"))
    more, claims_of_replicas = replica_rows(launch(replace(setting, repeats=3), 4, "replicas"))
    return finish("exchange", rows + more, claims | claims_of_replicas, json_path)
