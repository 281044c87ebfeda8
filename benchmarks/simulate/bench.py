"""The simulator held against two papers and this machine, and how fast it is.

Predicts NestPipe's table from its rows of 128 and 256 workers, TurboGR's rows from their baselines,
and our schedules in the papers' setting; compares the steps that `reality` has measured here, where
there are any, and the serving rates of benchmarks/results/serving.json, where it is recorded. What
is fixed beforehand: benchmarks/protocols/simulate.md.
"""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.simulate.calibration import calibrate
from benchmarks.simulate.nestpipe import law_rows, our_rows, predict_table, technique_rows
from benchmarks.simulate.reality import JOURNAL, compare
from benchmarks.simulate.serving_reality import RESULT, serving_rows
from benchmarks.simulate.turbogr import turbogr_rows
from slipstream.bench.harness import Row, describe, finish, joined_commits, median, note
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.simulate.serving_simulation import simulate_serving
from slipstream.simulate.training_simulation import simulate_training

STEPS, WORKERS = 100, 1536
REQUESTS, QUICK_REQUESTS, INSTANCES, RATE = 1_000_000, 5_000, 100, 2_000.0
Found = tuple[list[Row], dict[str, float]]


def peak_bytes() -> float:
    """Return the peak memory of this process."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def paper_rows(quick: bool) -> Found:
    """Predict the tables of both papers; short already, so `quick` changes nothing."""
    note("NestPipe's table from its rows of 128 and 256 workers")
    rows, claims = predict_table()
    laws = calibrate()
    ours, own = our_rows(laws)
    rows += [*ours, *technique_rows(laws), *law_rows(laws)]
    note("TurboGR's rows")
    return rows + turbogr_rows(), claims | own


def speed_rows(quick: bool) -> Found:
    """Time the simulator: a hundred steps of 1,536 workers, and one."""
    note("how fast the simulator is")
    settings: dict[str, Any] = {"workers": WORKERS, "micro_batches": 8}
    begin = time.perf_counter()
    simulate_training("accelerators", "nested", steps=8 if quick else STEPS, **settings)
    whole = time.perf_counter() - begin
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        simulate_training("accelerators", "nested", steps=1, **settings)
        samples.append(time.perf_counter() - begin)
    claims = {
        "seconds_100_steps": whole,
        "seconds_one_step": median(samples),
        "peak_bytes": peak_bytes(),
    }
    row: Row = {"variant": f"{WORKERS:,} workers, jagged and balanced", "part": "speed"}
    return [row | claims | {"samples": samples}], claims


def million_rows(quick: bool) -> Found:
    """Time a million requests on a hundred instances; a short run claims nothing."""
    requests = QUICK_REQUESTS if quick else REQUESTS
    note(f"{requests:,} requests on {INSTANCES} instances")
    tier = 512 << 20
    begin, worked = time.perf_counter(), time.process_time()
    report = simulate_serving(
        instances=INSTANCES,
        rate=RATE,
        requests=requests,
        traffic={"lengths": {"median": 512, "sigma": 0.5, "shortest": 1, "longest": 65_536}},
        config=InstanceConfig(device_bytes=tier, host_bytes=tier, host_path="simulated"),
    )
    figures = {
        "serving_million_seconds": time.perf_counter() - begin,
        "serving_million_cpu_seconds": time.process_time() - worked,
        "serving_million_peak_bytes": peak_bytes(),
    }
    row: Row = {"variant": f"{requests:,} requests on {INSTANCES} instances", "part": "million"}
    row |= figures | {"samples": {"report": report.row()}}
    return [row], {} if quick else figures


def rate_rows(quick: bool) -> Found:
    """Return recorded against simulated serving rates, where they are recorded."""
    return serving_rows(quick) if RESULT.is_file() else ([], {})


def step_rows(quick: bool) -> Found:
    """Return measured against simulated steps; short already, so `quick` changes nothing."""
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


PARTS: dict[str, Callable[[bool], Found]] = {
    "papers": paper_rows,
    "speed": speed_rows,
    "million": million_rows,
    "reality": step_rows,
    "rates": rate_rows,
}


def run(
    quick: bool, json_path: Path | None, parts: str = "", recorded: Path | None = None
) -> dict[str, Any]:
    """Print every comparison and the claims of the parts named, or of all.

    What a `recorded` result has of the other parts stays, and names its commit.
    """
    chosen = [each for each in parts.split(",") if each] or list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        raise SlipstreamError(f"no part is called '{unknown[0]}'; there are {', '.join(PARTS)}")
    rows: list[Row] = []
    claims: dict[str, float] = {}
    for name in chosen:
        found, claimed = PARTS[name](quick)
        rows, claims = rows + found, claims | claimed
    about: dict[str, Any] = {}
    if recorded is not None:
        before, new = read_json(recorded), {row["part"] for row in rows}
        kept = [row for row in before["rows"] if row["part"] not in new]
        rows = [origin(before) | row for row in kept] + [
            row | origin(describe("simulate")) for row in rows
        ]
        claims = before["claims"] | claims
        commits = joined_commits(row.get("commit", before["commit"]) for row in kept)
        about = {"command": before["command"], "commit": commits}
    return finish("simulate", rows, claims, json_path, about=about)


def origin(result: dict[str, Any]) -> Row:
    """Return what tells where a row was made."""
    return {name: result[name] for name in ("command", "commit", "machine", "when")}


def measure(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write figures and rows to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and short: shows that everything runs.")
    ] = False,
    parts: Annotated[
        str, typer.Option(help=f"Only these parts, separated by commas: {', '.join(PARTS)}.")
    ] = "",
    recorded: Annotated[
        Path | None,
        typer.Option(help="A result of this command; its other parts stay as they are."),
    ] = None,
) -> None:
    """Hold the simulator against two papers and this machine, and time it.

    Parts: `papers` (NestPipe's and TurboGR's rows), `speed` (1,536 workers), `million` (10^6
    requests on 100 instances), `reality` (the steps that were measured here), `rates` (those of
    the recorded serving benchmark).

    Example: python -m benchmarks.simulate --parts speed,million
    """
    run(quick, json_path, parts, recorded)
