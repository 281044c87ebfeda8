"""The simulator held against two papers and this machine, and how fast it is.

Predicts NestPipe's table from its rows of 128 and 256 workers, TurboGR's rows from their baselines,
and our schedules in the papers' setting; compares the steps that `reality` has measured here, where
there are any, and the serving rates of benchmarks/results/serving.json, where it is recorded. What
is fixed beforehand: benchmarks/protocols/simulate.md.
"""

import json
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.simulate.calibration import calibrate
from benchmarks.simulate.nestpipe import law_rows, our_rows, predict_table, technique_rows
from benchmarks.simulate.reality import JOURNAL, compare
from benchmarks.simulate.serving_reality import RESULT, serving_rows
from benchmarks.simulate.turbogr import turbogr_rows
from slipstream.bench.harness import Row, finish, median, note
from slipstream.simulate.training_simulation import simulate_training

STEPS, WORKERS = 100, 1536


def speed_rows(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Time the simulator: a hundred steps of 1,536 workers, and one."""
    settings: dict[str, Any] = {"workers": WORKERS, "micro_batches": 8}
    begin = time.perf_counter()
    simulate_training("accelerators", "nested", steps=8 if quick else STEPS, **settings)
    whole = time.perf_counter() - begin
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        simulate_training("accelerators", "nested", steps=1, **settings)
        samples.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    claims = {
        "seconds_100_steps": whole,
        "seconds_one_step": median(samples),
        "peak_bytes": float(peak),
    }
    row: Row = {"variant": f"{WORKERS:,} workers, jagged and balanced", "part": "speed"}
    return [row | claims | {"samples": samples}], claims


def reality_rows() -> tuple[list[Row], dict[str, float]]:
    """Return measured against simulated steps of every part that was measured."""
    rows: list[Row] = []
    for path in sorted(JOURNAL.glob("reality-*.json")):
        rows += compare(json.loads(path.read_text()))
    if not rows:
        return [], {}
    errors = [abs(row["error"]) for row in rows]
    return rows, {
        "reality_error_step": max(errors),
        "reality_error_step_median": median(errors),
        "reality_rows": float(len(rows)),
        "reality_rows_within_15": float(sum(error <= 0.15 for error in errors)),
    }


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Print every comparison and the claims."""
    note("NestPipe's table from its rows of 128 and 256 workers")
    rows, claims = predict_table()
    laws = calibrate()
    ours, own = our_rows(laws)
    rows += [*ours, *technique_rows(laws), *law_rows(laws)]
    claims |= own
    note("TurboGR's rows")
    rows += turbogr_rows()
    note("how fast the simulator is")
    speed, fast = speed_rows(quick)
    measured, reality = reality_rows()
    served, slo = serving_rows(quick) if RESULT.is_file() else ([], {})
    return finish(
        "simulate", [*rows, *speed, *measured, *served], claims | fast | reality | slo, json_path
    )
