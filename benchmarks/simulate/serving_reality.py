"""Simulated rates against those of the serving benchmark, where its result is recorded.

What a pass takes is fitted to the service times that the recorded run measured at its start; how
many requests are of users who asked before comes from its trace. Nothing of the searched rates is
used. Touch this when the serving benchmark records something else.
"""

from pathlib import Path
from statistics import median, pstdev
from typing import Any

import numpy as np

from benchmarks.evidence import RESULTS, read_result
from slipstream.bench.harness import Row
from slipstream.serving.instance.cost_model import non_negative_fit
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.simulate.serving_simulation import slo_rate
from slipstream.simulate.simulated_engine import EngineSpec

RESULT: Path = RESULTS / "serving.json"
TOKENS, HELD, CANDIDATES = 2, 8, 100  # of a behaviour; held back by a prefix; of a request
INSTANCES = {"relay": 2, "W1": 2}
REQUESTS, QUICK_REQUESTS = 20_000, 1_000
DEVICE_BYTES, HOST_BYTES = 1 << 30, 4 << 30
Runs = list[dict[str, Any]]


def fitted_spec(runs: Runs) -> EngineSpec:
    """Return the model of the benchmark with the times of its service runs."""
    samples, spreads = [], []
    for run in runs:
        if run["kind"] != "service" or not str(run["length"]).isdigit():
            continue
        tokens, times = TOKENS * int(run["length"]), run["samples"]
        if run["variant"] == "W1":
            samples.append((tokens + CANDIDATES, 0, median(times["rank_s"])))
            spreads.append(pstdev(np.log(times["rank_s"]).tolist()))
        elif run["variant"] == "relay":
            samples.append((HELD + CANDIDATES, tokens - HELD, median(times["hit_s"])))
    x_MF = np.array([[1.0, new, new * (past + new / 2), past] for new, past, _ in samples])
    found = non_negative_fit(x_MF, np.array([seconds for *_, seconds in samples]))
    return EngineSpec.model_validate(
        {
            "coefficients": tuple(found.tolist()),
            "jitter": min(1.0, median(spreads)),
            "tokens_per_behaviour": TOKENS,
        }
    )


def serving_rows(quick: bool = False) -> tuple[list[Row], dict[str, float]]:
    """Return a row per trace, length and variant: the recorded and the simulated rate."""
    found = read_result("serving")["rows"][0]["samples"]
    runs: Runs = found["runs"]
    spec = fitted_spec(runs)
    rows: list[Row] = []
    for label, group in found["figures"]["groups"].items():
        _, _, length = label.partition(" ")
        for variant, instances in INSTANCES.items():
            recorded = group["rates"].get(variant)
            if not recorded or not length.isdigit():
                continue
            simulated = slo_rate(
                recorded,
                QUICK_REQUESTS if quick else REQUESTS,
                instances=instances,
                spec=spec,
                http_ms=0.5,
                traffic=_traffic(length, group["returning"]),
                config=InstanceConfig(
                    relay=variant == "relay",
                    device_bytes=DEVICE_BYTES,
                    host_bytes=HOST_BYTES,
                    host_path="simulated",
                ),
            )
            rows.append(
                {
                    "variant": f"{label}: {variant}",
                    "part": "serving",
                    "recorded": recorded,
                    "simulated": simulated,
                    "error": simulated / recorded - 1,
                }
            )
    if not rows:
        return [], {}
    return rows, {"reality_error_slo": max(abs(row["error"]) for row in rows)}


def _traffic(length: str, returning: float) -> dict[str, Any]:
    """Return the traffic of a trace: users of one length, of whose requests a share returns."""
    lengths = {"median": float(length), "sigma": 0.0, "shortest": 1, "longest": 6144}
    pages = 1.0 / max(0.02, 1.0 - returning)
    return {"lengths": lengths, "pages": pages, "gap_seconds": 5.0, "gap_sigma": 0.5}
