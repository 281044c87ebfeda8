"""Runs the recorded benchmarks one after the other, and holds quick runs against what is recorded.

    python -m benchmarks.evidence_run                # run what is due, then write the tables
    python -m benchmarks.evidence_run tables hit     # only these, if they are due
    python -m benchmarks.evidence_run --force tables # whether or not it is due
    python -m benchmarks.evidence_run --plan         # say what is due, and why; run nothing
    python -m benchmarks.evidence_run --check        # quick runs; name what fell, exit 1

A benchmark is due when it has no result, or when its code or its protocol was committed after the
result was taken or has changes that are not committed. So a run that was stopped goes on where it
was. Each writes `results/NAME.json` when it has ended, and a quick run after it writes
`results/quick/NAME.json`, with which the check compares. `make evidence` and `make evidence-check`
call this; `ONLY="tables hit"` selects. Touch this when results are kept or compared in another way;
evidence_plan.py lists the benchmarks.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import evidence
from benchmarks.command import run_function
from benchmarks.evidence_plan import BENCHMARKS, Benchmark, Held
from slipstream.errors import SlipstreamError, did_you_mean

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
QUICK_TRIES = 2  # a figure that fell is measured once more, and the better one counts
Run = Callable[[Benchmark, Path, bool], None]


def git(*words: str) -> str:
    """Return what git says about this tree."""
    asked = ["git", "-C", str(ROOT), *words]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    return told.stdout.strip()


def changed_at(benchmark: Benchmark) -> datetime | None:
    """Return when code or protocol were committed last; None if they have changes since."""
    paths = [*benchmark.sources, benchmark.protocol]
    if git("status", "--porcelain", "--", *paths):
        return None
    last = git("log", "-1", "--format=%cI", "--", *paths)
    return datetime.fromisoformat(last) if last else None


def why_due(benchmark: Benchmark, results: Path) -> str | None:
    """Say why a benchmark must be run; None if its result is good."""
    path = results / f"{benchmark.name}.json"
    if not path.is_file():
        return "no result"
    changed = changed_at(benchmark)
    if changed is None:
        return "code or protocol are not committed"
    taken = datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["when"])
    if taken < changed:
        return f"code or protocol changed at {changed:%F %R}, after the result"
    return None


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks of these names in the order of the plan, or the usual ones."""
    known = [benchmark.name for benchmark in BENCHMARKS]
    for name in names:
        if name not in known:
            raise SlipstreamError(f"no recorded benchmark '{name}'{did_you_mean(name, known)}")
    return [one for one in BENCHMARKS if one.name in names or not (names or one.only_named)]


def start(benchmark: Benchmark, path: Path, quick: bool) -> None:
    """Run a benchmark in a process of its own; it writes its result to `path` at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", *benchmark.words, "--json", str(path)]
    done = subprocess.run([*words, *(["--quick"] if quick else [])], cwd=ROOT)
    if done.returncode != 0:
        raise SlipstreamError(f"{benchmark.name} ended with exit code {done.returncode}")
    if not path.is_file():
        raise SlipstreamError(f"{benchmark.name} wrote no result")


def run_due(benchmarks: Sequence[Benchmark], results: Path, *, force: bool, run: Run) -> list[str]:
    """Run what is due, each with its quick form after it; return the names of those that failed."""
    reasons = {one.name: "forced" if force else why_due(one, results) for one in benchmarks}
    due = [one for one in benchmarks if reasons[one.name] is not None]
    left = sum(one.minutes for one in due)
    typer.echo(f"{len(due)} of {len(benchmarks)} benchmarks are due, about {left} minutes")
    failed = []
    for number, one in enumerate(due, 1):
        typer.echo(
            f"[{number}/{len(due)}] {one.name}: {reasons[one.name]}; about {one.minutes} minutes, "
            f"{left} in all"
        )
        begin = time.monotonic()
        try:
            run(one, results / f"{one.name}.json", False)
            if one.held:
                run(one, results / "quick" / f"{one.name}.json", True)
        except SlipstreamError as error:
            typer.echo(f"[{number}/{len(due)}] {error}", err=True)
            failed.append(one.name)
        left -= one.minutes
        typer.echo(f"[{number}/{len(due)}] {one.name}: {(time.monotonic() - begin) / 60:.1f} min")
    return failed


@dataclass(frozen=True)
class Compared:
    """A figure beside the recorded one; `found` is None where nothing was recorded to compare."""

    benchmark: str
    held: Held
    recorded: float | None
    found: float | None

    @property
    def fell(self) -> bool:
        """Whether it is worse by more than its tolerance, or not there any more."""
        if self.recorded is None:
            return False
        return self.found is None or self.held.fell(self.recorded, self.found)

    def line(self) -> str:
        """Return what a reader sees."""
        name = f"{self.benchmark}.{self.held.name}"
        if self.recorded is None:
            return f"  ?  {name}: no quick run is recorded; 'make evidence' records one"
        found = "missing" if self.found is None else f"{self.found:.4g}"
        bar = f"{'at least' if self.held.better == 'higher' else 'at most'}"
        mark = "FELL" if self.fell else " ok "
        worst = self.held.worst(self.recorded)
        return f"{mark} {name}: {found}, recorded {self.recorded:.4g} ({bar} {worst:.4g})"


def recorded_claim(benchmark: Benchmark, held: Held, results: Path) -> float | None:
    """Return the recorded figure that a quick run compares with, if there is one."""
    quick = claims_at(results / "quick" / f"{benchmark.name}.json")
    full = claims_at(results / f"{benchmark.name}.json") if held.any_size else {}
    return (full | quick).get(held.name)


def claims_at(path: Path) -> dict[str, float]:
    """Return the claims of a result; none where there is no file."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dict(content["claims"])


def compare(benchmark: Benchmark, claims: dict[str, float], results: Path) -> list[Compared]:
    """Compare the claims of a quick run with the recorded ones."""
    return [
        Compared(
            benchmark.name, held, recorded_claim(benchmark, held, results), claims.get(held.name)
        )
        for held in benchmark.held
    ]


def better_of(first: list[Compared], second: list[Compared]) -> list[Compared]:
    """Return of two runs of one benchmark the better figure of each claim."""
    return [two if one.fell else one for one, two in zip(first, second, strict=True)]


def check_one(benchmark: Benchmark, results: Path, run: Run) -> list[Compared]:
    """Run a benchmark quickly, once more if something fell, and compare."""
    found: list[Compared] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-evidence-") as scratch:
        for number in range(QUICK_TRIES):
            path = Path(scratch) / f"{number}.json"
            run(benchmark, path, True)
            once = compare(benchmark, claims_at(path), results)
            found = better_of(found, once) if found else once
            if not any(each.fell for each in found):
                break
    return found


def check(benchmarks: Sequence[Benchmark], results: Path, run: Run) -> list[str]:
    """Hold quick runs against what is recorded; return what fell or failed."""
    holding = [one for one in benchmarks if one.held]
    lines, bad = [], []
    for number, one in enumerate(holding, 1):
        if all(recorded_claim(one, held, results) is None for held in one.held):
            lines += [each.line() for each in compare(one, {}, results)]
            continue
        typer.echo(f"[{number}/{len(holding)}] {one.name}, quick")
        try:
            found = check_one(one, results, run)
        except SlipstreamError as error:
            lines.append(f"FELL {error}")
            bad.append(one.name)
            continue
        lines += [each.line() for each in found]
        bad += [f"{each.benchmark}.{each.held.name}" for each in found if each.fell]
    typer.echo("\n".join(lines))
    return bad


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these benchmarks.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run also what is not due.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what is due; run nothing.")] = False,
    checking: Annotated[
        bool, typer.Option("--check", help="Compare quick runs with what is recorded.")
    ] = False,
) -> None:
    """Run the recorded benchmarks that are due, or hold quick runs against what is recorded."""
    benchmarks = chosen(names or [])
    if plan:
        for one in benchmarks:
            reason = why_due(one, RESULTS)
            typer.echo(f"{one.name}: {'good' if reason is None else f'due, {reason}'}")
        return
    if checking:
        if bad := check(benchmarks, RESULTS, start):
            raise SlipstreamError(f"worse than recorded: {', '.join(bad)}")
        return
    failed = run_due(benchmarks, RESULTS, force=force, run=start)
    evidence.write_tables(check=False)
    if failed:
        raise SlipstreamError(f"failed: {', '.join(failed)}; the others are recorded")


if __name__ == "__main__":
    run_function(main)
