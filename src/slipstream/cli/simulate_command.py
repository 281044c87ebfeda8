"""`slipstream simulate`: a schedule on a larger cluster, a fleet under more traffic.

Touch this when a table or a flag changes; the simulations are in slipstream/simulate.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.output import print_json
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.simulate import EngineSpec, ServingReport, TrainingReport

simulate = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Run schedules and serving policies on clusters and fleets you do not have.",
)
JsonTo = Annotated[
    Path | None,
    typer.Option("--json", help="Write every figure to this file; - is standard output."),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]


@simulate.callback()
def _group() -> None:
    """Run schedules and serving policies on clusters and fleets you do not have."""


@simulate.command()
def training(
    cluster: Annotated[
        str,
        typer.Option(help="A cluster file, or one that ships: nestpipe, accelerators."),
    ] = "nestpipe",
    workers: Annotated[
        str | None,
        typer.Option(help="Numbers of workers, as 128,256,1536; default: the cluster file's."),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Schedules, as serial,nested; all: every one there is.")
    ] = "serial,dual_buffer,nested",
    replicas: Annotated[int | None, typer.Option(min=1, help="Copies of the tables.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, max=256, help="Parts of a batch; default: the schedule's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps after the warm-up.")] = 12,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for plots and a trace (Perfetto) of every simulation."),
    ] = None,
    json: JsonTo = None,
) -> None:
    """Simulate training steps: how long they take, what stays exposed, how far they scale.

    The schedules are those that train here. A cluster file describes devices, hosts and links, or
    gives the times of a step. Efficiency is relative to the smallest number of workers.

    Example: slipstream simulate training --workers 128,512,1536 --schedule serial,nested
    """
    from slipstream.pipeline.schedule import SCHEDULES
    from slipstream.simulate import open_cluster, scale_training

    place = open_cluster(cluster)
    numbers = sorted(_numbers(workers)) if workers else [place.workers]
    names = list(SCHEDULES) if schedule == "all" else schedule.split(",")
    found: list[TrainingReport] = []
    for name in names:
        cut = micro_batches if SCHEDULES.get(name) and SCHEDULES[name].cuts_batches else None
        found += scale_training(
            place, name, numbers, replicas=replicas, micro_batches=cut, steps=steps, seed=seed
        )
    if out is not None:
        _draw_training(out, found)
    if json is not None:
        _write(json, "simulate", [_training_row(each) for each in found], _claims(found))
    if json != Path("-"):
        Console().print(_training_table(found))
        if out is not None:
            Console(highlight=False).print(f"plots and traces are in {out}", soft_wrap=True)


@simulate.command()
def serving(
    instances: Annotated[int, typer.Option(min=1, max=10_000, help="Instances behind a router.")],
    rate: Annotated[float, typer.Option(min=0.001, help="Ranking requests a second, in all.")],
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many to serve.")] = (
        10_000
    ),
    slo_ms: Annotated[float, typer.Option(min=1, help="Limit of the ranking stage.")] = 80.0,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Measure this bundle's passes here first; default: a small HSTU."),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Median behaviours of a history.")] = 512,
    length_sigma: Annotated[float, typer.Option(min=0, help="Spread of lengths, lognormal.")] = 0.5,
    pages: Annotated[float, typer.Option(min=1, help="Requests of a session; 1: no reuse.")] = 8.0,
    device_mb: Annotated[int, typer.Option(min=1, help="Device tier of an instance.")] = 512,
    host_mb: Annotated[int, typer.Option(min=0, help="Host tier of an instance; 0: none.")] = 512,
    relay: Annotated[bool, typer.Option(help="Pre-infer and keep prefixes, or all in line.")] = (
        True
    ),
    request_ms: Annotated[
        float,
        typer.Option(min=0, help="An instance's processor time of a request besides its pass."),
    ] = 0.6,
    cores: Annotated[
        int | None,
        typer.Option(min=1, help="Instances and router share so many; default: one each."),
    ] = None,
    router_ms: Annotated[
        float, typer.Option(min=0, help="With --cores: the router's, of a request.")
    ] = 0.35,
    client_ms: Annotated[
        float, typer.Option(min=0, help="With --cores: that of clients on the same machine.")
    ] = 0.0,
    deaths: Annotated[int, typer.Option(min=0, help="Instances that die during the run.")] = 0,
    slow_instances: Annotated[int, typer.Option(min=0, help="Instances three times slower.")] = 0,
    rolling_restart: Annotated[
        bool, typer.Option("--rolling-restart", help="Restart one instance after the other.")
    ] = False,
    seed: Seed = 0,
    json: JsonTo = None,
) -> None:
    """Simulate a fleet: SLO compliance, hits by tier, wasted pre-inferences.

    Trigger, scheduler, prefix tiers, balancer and outlier detection are those that serve here, in
    virtual time.

    Example: slipstream simulate serving --instances 100 --rate 2000 --deaths 3
    """
    from slipstream.serving.instance.instance_config import InstanceConfig
    from slipstream.simulate import simulate_serving

    report = simulate_serving(
        instances=instances,
        rate=rate,
        requests=requests,
        slo_ms=slo_ms,
        spec=None if bundle is None else _measured_spec(bundle),
        traffic={
            "pages": pages,
            "lengths": {"median": length, "sigma": length_sigma, "shortest": 1, "longest": 65_536},
        },
        config=InstanceConfig(
            device_bytes=device_mb << 20,
            host_bytes=host_mb << 20,
            host_path="simulated" if host_mb else None,
            relay=relay,
        ),
        calls={
            "instance_seconds": request_ms / 1e3,
            "router_seconds": router_ms / 1e3,
            "client_seconds": client_ms / 1e3,
            "cores": cores,
        },
        trouble={
            "deaths": deaths,
            "slow_instances": slow_instances,
            "rolling_restart": rolling_restart,
        },
        seed=seed,
    )
    if json is not None:
        name = f"{instances} instances at {rate:g} a second"
        claims = {"within_slo": report.within_slo, "p99_ms": report.p99_ms}
        _write(json, "simulate_serving", [{"variant": name} | report.row()], claims)
    if json != Path("-"):
        Console(highlight=False).print(_serving_table(report))


def _measured_spec(bundle: Path) -> "EngineSpec":
    from slipstream.serving.engine.engine import Engine
    from slipstream.serving.instance.cost_model import CostModel
    from slipstream.simulate import EngineSpec

    engine = Engine(bundle)
    sizes = {
        "tokens_per_behaviour": engine.tokens_per_behaviour,
        "user_tokens": engine.user_tokens,
        "window": engine.rules.window,
    }
    return EngineSpec.measured(engine.config, CostModel.measure(engine).measured(), **sizes)


def _serving_table(report: "ServingReport") -> Table:
    title = f"{report.instances} instances, {report.rate:g} requests a second, simulated"
    table = Table(title=title, show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows = {
        f"within {report.slo_ms:g} ms": f"{100 * report.within_slo:.2f} %",
        "answered": f"{100 * report.answered:.2f} %",
        "p50, p99": f"{report.p50_ms:.1f} ms, {report.p99_ms:.1f} ms",
        "compute threads busy": f"{100 * report.busy:.1f} %",
        "pre-inferences": f"{report.admitted:,}, of which wasted {report.wasted:,}",
        "retries, lost": f"{report.retries:,}, {report.lost:,}",
    }
    rows |= {f"hit: {name}": f"{count:,}" for name, count in report.hits.items()}
    filled = {name.replace("_", " "): count for name, count in report.filled.items()}
    rows |= {f"prefixes {name}": f"{count:,}" for name, count in filled.items()}
    refused = {name.replace("_", " "): count for name, count in report.refused.items()}
    rows |= {f"refused: {name}": f"{count:,}" for name, count in refused.items()}
    rows |= {f"ejected: {name}": f"{count:,}" for name, count in report.ejected.items()}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise SlipstreamError(
            f"--workers takes whole numbers with commas between them, got '{text}'"
        ) from None
    if min(found) < 1:
        raise SlipstreamError(f"--workers takes numbers of at least 1, got '{text}'")
    return found


def _training_row(report: "TrainingReport") -> dict[str, Any]:
    name = f"{report.schedule} at {report.workers} workers"
    return {"variant": name} | report.row()


def _claims(found: "list[TrainingReport]") -> dict[str, float]:
    """Return the figures of the largest simulated cluster, the best schedule of each."""
    largest = max(report.workers for report in found)
    at = {report.schedule: report for report in found if report.workers == largest}
    claims = {
        f"efficiency_{largest}": max(report.efficiency or 1.0 for report in at.values()),
        f"step_ms_{largest}": 1e3 * min(report.step_seconds for report in at.values()),
    }
    if "serial" in at:
        best = min(report.step_seconds for report in at.values())
        claims[f"speedup_{largest}"] = at["serial"].step_seconds / best
    return claims


def _training_table(found: "list[TrainingReport]") -> Table:
    first = found[0]
    caption = "percent of a step: compute, and waits for lookup and for communication"
    table = Table(title=f"{first.cluster}: simulated training", caption=caption)
    for heading in ("schedule", "workers", "step ms", "scaling %", "compute", "lookup", "comm"):
        name = heading == "schedule"
        table.add_column(heading, justify="left" if name else "right", no_wrap=name)
    for report in found:
        cut = f" x{report.micro_batches}" if report.micro_batches > 1 else ""
        copies = f" ({report.shards}x{report.replicas})" if report.replicas > 1 else ""
        table.add_row(
            report.schedule + cut,
            f"{report.workers:,}{copies}",
            f"{1e3 * report.step_seconds:,.1f}",
            "" if report.efficiency is None else f"{100 * report.efficiency:.1f}",
            f"{100 * report.compute_utilisation:.1f}",
            f"{100 * report.exposed_lookup:.1f}",
            f"{100 * report.exposed_comm:.1f}",
        )
    return table


def _draw_training(out: Path, found: "list[TrainingReport]") -> None:
    from slipstream.pipeline.timeline import draw_timeline
    from slipstream.pipeline.trace import write_trace
    from slipstream.simulate.plots import draw_scaling

    out.mkdir(parents=True, exist_ok=True)
    draw_scaling(out / "scaling.png", found)
    for report in found:
        name = f"{report.schedule}-{report.workers}"
        about = {"run": report.cluster, "schedule": report.schedule, "simulated": True}
        write_trace(out / f"{name}.json", report.intervals, about)
        title = f"{report.cluster}, {report.schedule}, {report.workers} workers, simulated"
        draw_timeline(out / f"{name}.png", report.intervals, title, steps=2)


def _write(path: Path, bench: str, rows: list[dict[str, Any]], claims: dict[str, float]) -> None:
    """Write figures as the benches do; - is standard output."""
    if path == Path("-"):
        print_json({"bench": bench, "rows": rows, "claims": claims})
        return
    import json

    from slipstream.bench.harness import command_line, commit, short_machine
    from slipstream.files import atomic_file

    content: dict[str, Any] = {"bench": bench, "command": command_line(), "commit": commit()}
    content |= {"machine": short_machine(), "rows": rows, "claims": claims}
    with atomic_file(path) as temporary:
        Path(temporary).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
