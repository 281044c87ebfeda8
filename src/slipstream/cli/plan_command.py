"""`slipstream plan`: what is needed for a demand, why, and what changes it.

Touch this when the plan is printed in another way; it is made in simulate/planner.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from slipstream.simulate.cluster import Cluster
    from slipstream.simulate.planner import Plan

_CHECK_TOKENS = 4_096  # of the step that --check times
_CHECK_REPEATS = 5


def plan(
    cluster: Annotated[
        str, typer.Option(help="A cluster file with devices and a workload; or one that ships.")
    ] = "accelerators",
    rate: Annotated[float, typer.Option(min=0.001, help="Ranking requests a second.")] = 100.0,
    events: Annotated[
        float, typer.Option(min=0.001, help="Events a second that training keeps up with.")
    ] = 10_000.0,
    slo_ms: Annotated[float, typer.Option(min=1, help="99th percentile of the ranking stage.")] = (
        80.0
    ),
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the item table; default: the file's.")
    ] = None,
    history: Annotated[float, typer.Option(min=1, help="Median behaviours of a user.")] = 1024.0,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare with a short measurement on this machine."),
    ] = False,
    bundle: Annotated[
        Path | None, typer.Option(help="With --check: also time this bundle's passes.")
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option(help="Also plan with each input changed alone.")
    ] = True,
    seed: Annotated[int, typer.Option(help="The same seed gives the same plan.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Plan training and serving: mesh, schedule, instances, memory, cost, and why.

    Every number comes from a simulation on devices like those of the cluster file. --check times a
    training step here and says how far the same arithmetic is off on this machine.

    Example: slipstream plan --rate 2000 --events 50000 --rows 1000000000 --slo-ms 80
    """
    from slipstream.simulate.cluster import open_cluster
    from slipstream.simulate.planner import make_plan

    place = open_cluster(cluster)
    demand = {
        "requests_per_second": rate,
        "events_per_second": events,
        "slo_ms": slo_ms,
        "table_rows": rows,
        "history": history,
    }
    console = Console(highlight=False)
    with Console(stderr=True).status("simulating meshes, schedules and fleets"):
        made = make_plan(demand, place, sensitivity=sensitivity, seed=seed)
    checked = _check(place, bundle) if check else []
    if json:
        print_json(made.row() | {"check": checked})
        return
    console.print(_plan_table(made))
    for reason in made.reasons:
        console.print(f"- {reason}", soft_wrap=True)
    if made.sensitivity:
        console.print(_sensitivity_table(made))
    for row in checked:
        console.print(
            f"check: {row['what']}: predicted {row['predicted_ms']:.1f} ms, measured "
            f"{row['measured_ms']:.1f} ms on this machine ({100 * row['error']:+.0f} %)",
            soft_wrap=True,
        )


def _plan_table(made: "Plan") -> Table:
    training, serving = made.training, made.serving
    table = Table(title="plan", show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows = {
        "training workers": f"{training.workers:,} ({training.shards}x{training.replicas})",
        "schedule": f"{training.schedule}, {training.micro_batches} micro-batches, "
        f"{training.buffers_ahead} ahead",
        "step": f"{training.step_ms:,.1f} ms",
        "table and buffers a device": f"{training.table_gb:,.1f} GB, {training.buffer_gb:,.2f} GB",
        "serving instances": f"{serving.instances:,}",
        "device and host cache": f"{serving.device_cache_gb:.2f} GB, "
        f"{serving.host_cache_gb:.2f} GB",
        "within the SLO, p99": f"{100 * serving.within_slo:.2f} %, {serving.p99_ms:.1f} ms",
        "cost": f"{made.dollars_per_hour:,.0f} an hour",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _sensitivity_table(made: "Plan") -> Table:
    table = Table(title="what changes it")
    for heading in ("change", "workers", "step ms", "instances", "cost an hour"):
        table.add_column(heading, justify="left" if heading == "change" else "right")
    for row in made.sensitivity:
        if "impossible" in row:
            table.add_row(row["change"], "none", "", "", "")
            continue
        table.add_row(
            row["change"],
            f"{row['workers']:,}",
            f"{row['step_ms']:,.1f}",
            f"{row['instances']:,}",
            f"{row['dollars_per_hour']:,.0f}",
        )
    return table


def _check(cluster: "Cluster", bundle: Path | None) -> list[dict[str, Any]]:
    """Time a step (and a bundle's passes) here, and predict both with this machine's peak."""
    from slipstream.simulate.planner import device_spec

    place = _this_machine(cluster)
    found = [_checked_step(place)]
    if bundle is not None:
        from slipstream.serving.engine.engine import Engine
        from slipstream.serving.instance.cost_model import CostModel

        engine = Engine(bundle)
        work = place.workload
        assert work is not None
        own = work.model_copy(update={"model": engine.config})
        spec = device_spec(place.model_copy(update={"workload": own}))
        measured = CostModel.measure(engine)
        for tokens in (512, 2048):
            found.append(
                _comparison(
                    f"a pass of {tokens} tokens",
                    spec.cost_model().plain_seconds(tokens, 0),
                    measured.plain_seconds(tokens, 0),
                )
            )
    return found


def _this_machine(cluster: "Cluster") -> "Cluster":
    """Return the cluster with this machine's matmul peak as its device, one of them."""
    import time

    from slipstream.bench.harness import matmul_peak, median

    multiply, flops = matmul_peak()
    taken = []
    for _ in range(_CHECK_REPEATS + 1):
        begin = time.perf_counter()
        multiply()
        taken.append(time.perf_counter() - begin)
    device = cluster.device.model_copy(update={"teraflops": flops / median(taken[1:]) / 1e12})
    return cluster.model_copy(update={"device": device, "workers": 1, "replicas": 1})


def _checked_step(cluster: "Cluster") -> dict[str, Any]:
    """Time a training step of the workload's model here, beside what the plan predicts for it."""
    import time

    from slipstream.bench.harness import median
    from slipstream.bench.step_samples import JaggedStep, batch_of
    from slipstream.models.flops import training_flops
    from slipstream.training.recipe import Recipe

    work = cluster.workload
    assert work is not None
    length = min(work.model.max_len, 512)
    lengths = [length] * max(1, _CHECK_TOKENS // length)
    recipe = Recipe.model_validate(
        {
            "name": "check",
            "model": work.model.model_dump(),
            "loss": {"kind": "shared_softmax", "negatives": max(1, work.negatives)},
        }
    )
    step, batch = JaggedStep.of(recipe, 10_000), batch_of(lengths, 10_000)
    taken = []
    for _ in range(_CHECK_REPEATS + 1):
        begin = time.perf_counter()
        step(batch)
        taken.append(time.perf_counter() - begin)
    flops = training_flops(work.model, lengths, negatives=work.negatives)
    predicted = flops / (cluster.device.teraflops * 1e12 * cluster.device.efficiency)
    what = f"a training step of {sum(lengths):,} tokens"
    return _comparison(what, predicted, median(taken[1:]))


def _comparison(what: str, predicted: float, measured: float) -> dict[str, Any]:
    return {
        "what": what,
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "error": predicted / measured - 1,
    }
