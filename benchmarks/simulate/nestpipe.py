"""NestPipe's table predicted from its rows of 128 and 256 workers, and our schedules in its place.

Touch this only together with benchmarks/protocols/simulate.md.
"""

from dataclasses import replace
from typing import Any

from benchmarks.simulate import papers
from benchmarks.simulate.calibration import (
    Choices,
    Laws,
    calibrate,
    nested_step,
    scaled,
    serial_step,
)
from slipstream.bench.harness import Row
from slipstream.simulate.cluster import Cluster
from slipstream.simulate.step_times import PhaseTimes
from slipstream.simulate.training_simulation import simulate_training

LARGEST = papers.WORKERS[-1]
HELD_OUT = tuple(workers for workers in papers.WORKERS if workers not in papers.CALIBRATION)
PARTS = (8, 16, 32)
CUT_GROWTH = 1.05  # exchanges grow by this with every doubling of the micro-batches beyond 8
OUTLOOK = 10_000


def _table_share(share: float) -> dict[str, float]:
    """Return a lookup of which the table's lane does so much, the keys' lane the rest."""
    keys, table = (1 - share) / 2, share
    return {"route": keys, "place": keys, "retrieve": 0.75 * table, "write": 0.25 * table}


VARIED = {
    "as the protocol says": Choices(),
    "lookup as n log n": Choices(lookup="n_log_n"),
    "lookup as a power of n": Choices(lookup="power"),
    "lookup as log n": Choices(lookup="log"),
    "all-to-all as a power of n": Choices(exchange="power"),
    "groups shorten only what grows with peers": Choices(groups_shorten_all=False),
    "exchange between groups does not grow": Choices(between_grows=False),
    "5 % of communication dense, not hidden": Choices(dense_share=0.05),
    "10 % of communication dense, not hidden": Choices(dense_share=0.10),
    "table's lane does 40 % of a lookup": Choices(lookup_split=_table_share(0.4)),
    "table's lane does 60 % of a lookup": Choices(lookup_split=_table_share(0.6)),
    "table's lane does 75 % of a lookup": Choices(lookup_split=_table_share(0.75)),
}
AFTERWARDS = "afterwards: a lookup jumps once between 256 and 512 workers"


def steps_by_system(laws: Laws, workers: int) -> dict[str, float]:
    """Return every system's predicted milliseconds."""
    return {
        "TorchRec": serial_step(laws, workers),
        "2D-SP": serial_step(laws, workers, papers.GROUPS),
        "UniEmb": laws.compute + laws.exchange.at(workers) + laws.residual_uniemb,
        "NestPipe": nested_step(laws, workers),
    }


def jumping(laws: Laws, workers: int) -> Laws:
    """Return the laws with a lookup that jumps by what TorchRec's row of 512 workers lacks.

    The row of 512 workers sets the jump, so this is a description made afterwards.
    """
    if workers <= papers.CALIBRATION[-1]:
        return laws
    row = papers.NESTPIPE["TorchRec"]
    printed = laws.steps_128["TorchRec"] / row.efficiency[512]
    jump = printed - serial_step(laws, 512)
    lookup = laws.lookup.model_copy(update={"constant": laws.lookup.constant + jump})
    return replace(laws, lookup=lookup)


def efficiency_rows(laws: Laws, title: str, *, jump: bool = False) -> list[Row]:
    """Return predicted and printed efficiencies of every system and number of workers."""
    base = steps_by_system(laws, papers.WORKERS[0])
    rows: list[Row] = []
    for workers in papers.WORKERS[1:]:
        used = jumping(laws, workers) if jump else laws
        found = steps_by_system(used, workers)
        for system, step in found.items():
            printed = papers.NESTPIPE[system].efficiency[workers]
            rows.append(_row(title, system, workers, step, base[system] / step, printed))
    used = jumping(laws, LARGEST) if jump else laws
    step = nested_step(used, LARGEST, groups=papers.GROUPS)
    predicted = base["NestPipe"] / step
    rows.append(
        _row(title, papers.NESTED_2D, LARGEST, step, predicted, papers.NESTED_2D_EFFICIENCY)
    )
    return rows


def _row(
    title: str, system: str, workers: int, step: float, predicted: float, printed: float
) -> Row:
    return {
        "variant": f"{title}: {system}, {workers} workers",
        "part": "nestpipe",
        "laws": title,
        "system": system,
        "workers": workers,
        "calibrates": workers in papers.CALIBRATION,
        "step_ms": step,
        "predicted": predicted,
        "printed": printed,
        "points": 100 * (predicted - printed),
    }


def variation_row(title: str, rows: list[Row], speedup: float) -> Row:
    """Return what one varied assumption does at 1,536 workers and at its worst."""
    held = [row for row in rows if row["workers"] in HELD_OUT]
    at = {row["system"]: row["predicted"] for row in rows if row["workers"] == LARGEST}
    return {
        "variant": title,
        "part": "varied",
        **at,
        "speedup": speedup,
        "speedup_error": speedup / papers.NESTED_SPEEDUP - 1,
        "worst_points": max(abs(row["points"]) for row in held),
        "rows_beyond_5": sum(abs(row["points"]) > 5 for row in held),
        "rows_held_out": len(held),
    }


def predict_table() -> tuple[list[Row], dict[str, float]]:
    """Return the rows of NestPipe's table and of every varied assumption, and the claims."""
    rows: list[Row] = []
    claims: dict[str, float] = {}
    for title, choices in VARIED.items():
        laws = calibrate(choices)
        found = efficiency_rows(laws, title)
        steps = steps_by_system(laws, LARGEST)
        varied = variation_row(title, found, steps["TorchRec"] / steps["NestPipe"])
        if choices == Choices():
            rows += found
            claims = {
                "worst_error_points": varied["worst_points"],
                "rows_beyond_5_points": float(varied["rows_beyond_5"]),
                "worst_error_points_1536": max(
                    abs(row["points"]) for row in found if row["workers"] == LARGEST
                ),
                "nestpipe_speedup_1536": varied["speedup"],
                "nestpipe_speedup_error": varied["speedup_error"],
            }
        rows.append(varied)
    laws = calibrate()
    found = efficiency_rows(laws, AFTERWARDS, jump=True)
    steps = steps_by_system(jumping(laws, LARGEST), LARGEST)
    rows += [*found, variation_row(AFTERWARDS, found, steps["TorchRec"] / steps["NestPipe"])]
    return rows, claims


# ---- our schedules in the paper's setting -------------------------------------------------------


def printed_phases(laws: Laws, workers: int, groups: int, *, at_end: bool) -> PhaseTimes:
    """Return the stage times that the paper prints at 1,536 workers, or those of 128."""
    at = _printed_at_1536() if workers == LARGEST else _printed_at_128(laws)
    in_group = at["exchange"] / groups
    between = 0.0
    if groups > 1:
        total = papers.COMM_2D_1536 if workers == LARGEST else _grouped_at_128(laws)
        between = max(0.0, total - in_group) / (groups - 1)
    return PhaseTimes.model_validate(
        {
            **at,
            "between_groups": between,
            "overhead": papers.VISIBLE_LOOKUP_1536,
            "between_at_end": at_end,
            "samples": papers.SAMPLES,
        }
    )


def _printed_at_1536() -> dict[str, Any]:
    return {
        "compute": papers.COMPUTE_1536,
        "lookup": papers.LOOKUP_1536,
        "exchange": papers.COMM_1536,
    }


def _printed_at_128(laws: Laws) -> dict[str, Any]:
    whole = papers.STEP_1536["TorchRec"] * papers.NESTPIPE["TorchRec"].efficiency[LARGEST]
    return {
        "compute": papers.COMPUTE_SHARE * whole,
        "lookup": papers.LOOKUP_SHARE * whole,
        "exchange": papers.COMM_SHARE * whole,
    }


def _grouped_at_128(laws: Laws) -> float:
    """Return the communication of 4 groups at 128 workers, by the law."""
    return laws.exchange.at(128) / papers.GROUPS + (papers.GROUPS - 1) * laws.between.at(128)


def our_step(
    phases: PhaseTimes, schedule: str, workers: int, groups: int, parts: int, taper: float = 0.5
) -> float:
    """Return the simulated milliseconds of one of our schedules."""
    grown = CUT_GROWTH ** max(0, (parts // 8).bit_length() - 1) if parts > 8 else 1.0
    update = {"exchange": scaled(phases.exchange, grown)}
    cluster = Cluster(name="ours", phases=phases.model_copy(update=update), taper=taper)
    report = simulate_training(
        cluster, schedule, workers=workers, replicas=groups, micro_batches=parts, steps=6
    )
    return 1e3 * report.step_seconds


def our_rows(laws: Laws) -> tuple[list[Row], dict[str, float]]:
    """Return our `nested` at every cut, flat and with replicas, and the best one that ships."""
    rows: list[Row] = []
    for groups in (1, papers.GROUPS):
        for at_end in (True, False) if groups > 1 else (True,):
            for parts in PARTS:
                steps = {
                    workers: our_step(
                        printed_phases(laws, workers, groups, at_end=at_end),
                        "nested",
                        workers,
                        groups,
                        parts,
                    )
                    for workers in (128, LARGEST)
                }
                where = "flat" if groups == 1 else f"{groups} replicas"
                how = "" if at_end else ", summed with every micro-batch (not shipped)"
                rows.append(
                    {
                        "variant": f"{where}, {parts} micro-batches{how}",
                        "part": "ours",
                        "ships": at_end,
                        "step_128_ms": steps[128],
                        "step_ms": steps[LARGEST],
                        "efficiency": steps[128] / steps[LARGEST],
                        "speedup": papers.STEP_1536["TorchRec"] / steps[LARGEST],
                    }
                )
    best = max((row for row in rows if row["ships"]), key=lambda row: row["speedup"])
    return rows, {"efficiency_1536": best["efficiency"], "speedup_1536": best["speedup"]}


def technique_rows(laws: Laws) -> list[Row]:
    """Return what each technique is worth at 1,536 workers: added in turn, removed alone."""
    phases = printed_phases(laws, LARGEST, 1, at_end=True)

    def step(schedule: str, parts: int, taper: float = 0.5) -> float:
        return our_step(phases, schedule, LARGEST, 1, parts, taper)

    added = {
        "serial": step("serial", 1),
        "+ two buffers (dual_buffer)": step("dual_buffer", 1),
        "+ 8 equal micro-batches (nested)": step("nested", 8, 1.0),
        "+ first and last part half as large": step("nested", 8),
        "+ 16 micro-batches": step("nested", 16),
    }
    removed = {
        "without two buffers (frozen_window)": step("frozen_window", 16),
        "without micro-batches (dual_buffer)": step("dual_buffer", 1),
        "without the smaller ends": step("nested", 16, 1.0),
    }
    rows: list[Row] = []
    before = None
    for title, taken in {**added, **removed}.items():
        alone = title in removed
        reference = added["+ 16 micro-batches"] if alone else before
        rows.append(
            {
                "variant": title,
                "part": "techniques",
                "step_ms": taken,
                "speedup": added["serial"] / taken,
                "changes_ms": None if reference is None else taken - reference,
            }
        )
        before = taken
    return rows


def law_rows(laws: Laws) -> list[Row]:
    """Return our `nested` by the laws alone, at 1,536 and 10,000 workers, an outlook."""
    rows: list[Row] = []
    slow = "lookup as log n"
    lookups = {"lookup linear": laws.lookup, slow: calibrate(VARIED[slow]).lookup}
    for title, lookup in lookups.items():
        used = replace(laws, lookup=lookup)
        phases = used.phases(residual=laws.residual_nested, between_at_end=True)
        base = our_step(phases, "nested", 128, 1, 16)
        for workers, groups in ((LARGEST, 1), (LARGEST, 4), (OUTLOOK, 1), (OUTLOOK, 4)):
            taken = our_step(phases, "nested", workers, groups, 16)
            rows.append(
                {
                    "variant": f"{title}: {workers:,} workers, {groups} group{'s' * (groups > 1)}",
                    "part": "by laws",
                    "step_ms": taken,
                    "efficiency": base / taken,
                    "speedup": serial_step(used, workers) / taken,
                }
            )
    return rows
