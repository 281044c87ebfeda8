"""The flags of `python -m benchmarks.serving`.

Touch this when the benchmark gets another flag; the parts are in bench.py.
"""

import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.serving.bench import FULL, PARTS, QUICK, ServingBench
from benchmarks.serving.claims import compute_claims, group_rows
from benchmarks.serving.load import LOADGEN_RUNS
from benchmarks.serving.runs import Row
from slipstream.bench.harness import finish, joined_commits
from slipstream.errors import SlipstreamError
from slipstream.interrupts import terminated_as_interrupted

PERCENTILES = (0, 10, 25, 50, 75, 90, 95, 98, 99, 100)


def measure(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write figures and runs to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and short: shows that everything runs.")
    ] = False,
    parts: Annotated[
        str, typer.Option(help=f"Only these parts, separated by commas: {', '.join(PARTS)}.")
    ] = "",
    lengths: Annotated[
        str, typer.Option(help="Only these lengths of sessions and no_reuse, such as 512,mix.")
    ] = "",
    variants: Annotated[
        str, typer.Option(help="Only these variants of sessions: relay, W1, W2, W3, W4.")
    ] = "",
    work: Annotated[
        Path, typer.Option(help="Directory of the journal and of what servers need.")
    ] = Path("runs/serving-bench"),
    recorded: Annotated[
        Path | None,
        typer.Option(help="A result of this command; its runs count as made."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many minutes; start again to go on.")
    ] = None,
) -> None:
    """Rates and lengths within a latency limit, through `slipstream serve`: relay against in line.

    Parts: `sessions` and `no_reuse` (rates of all variants), `once` (wide mix, long histories, many
    candidates), `longest` (history at a fixed rate), `ablations` (trigger, host tier), `truncation`
    (what W4 loses), `recommend`, `hit`. Every run is kept in --work, and the same command goes on
    after the last one. Real sessions come from logs in the folders of $SLIPSTREAM_DATA.

    Example: python -m benchmarks.serving --parts sessions --lengths 512,1024 --variants relay,W1
    """
    chosen = [each for each in parts.split(",") if each] or list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        raise SlipstreamError(f"no part is called '{unknown[0]}'; there are {', '.join(PARTS)}")
    begin, console = time.monotonic(), Console(highlight=False, soft_wrap=True)
    bench = ServingBench(
        QUICK if quick else FULL,
        work / "quick" if quick else work,
        console,
        minutes,
        lengths=tuple(each for each in lengths.split(",") if each),
        variants=tuple(each for each in variants.split(",") if each),
    )
    if recorded is not None:
        bench.take_over(recorded)
    names = " and ".join(log.name for log in bench.logs)
    console.print(f"sessions of {names}; journal {bench.journal.path}")
    try:
        with terminated_as_interrupted():
            whole = bench.run_parts(chosen)
    except KeyboardInterrupt:
        if LOADGEN_RUNS.is_set():  # its thread would call into an interpreter that is gone
            os._exit(130)
        raise
    report(bench, json_path if whole else None, (time.monotonic() - begin) / 60)


def report(bench: ServingBench, json_path: Path | None, minutes: float) -> dict[str, Any]:
    """Print the table and the claims, and write the JSON."""
    runs = [with_percentiles(row) for row in bench.journal.rows.values()]
    claims = compute_claims(bench.figures, runs, bench.setting.reuse_lengths[-1])
    claims["minutes"] = max(minutes, sum(row["seconds"] for row in runs) / 60)
    rows = group_rows(bench.figures) or [{"variant": "none", "slo_qps": None}]
    rows[0]["samples"] = {"runs": runs, "figures": bench.figures}
    commits = sorted({run["commit"] for run in runs if run.get("commit")})
    return finish("serving", rows, claims, json_path, about={"commit": joined_commits(commits)})


def with_percentiles(run: Row) -> Row:
    """Return a run with percentiles of its latencies in place of every single one.

    The journal keeps them all; a result is read by people, too. A miss without an answer is null.
    """
    samples = dict(run["samples"])
    latencies = samples.pop("latencies_ms", None)
    if latencies:
        ascending = sorted(math.inf if each is None else each for each in latencies)
        shares = np.array(PERCENTILES) / 100
        found = np.quantile(ascending, shares, method="higher").tolist()
        samples["latency_percentiles_ms"] = {
            str(percent): value if math.isfinite(value) else None
            for percent, value in zip(PERCENTILES, found, strict=True)
        }
    return {**run, "samples": samples}
