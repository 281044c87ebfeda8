"""Rates and lengths within a latency limit, through `slipstream serve`: relay against in line.

The protocol is in protocols/serving.md. Touch this when a part is added; a run is made in runs.py,
the search is in search.py, the claims are computed in claims.py.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.machine_pauses import PauseWitness
from benchmarks.serving import trace as serving_trace
from benchmarks.serving.bundle import random_bundle
from benchmarks.serving.load import noise_floor
from benchmarks.serving.runs import Journal, Row, Runner, RunPlan, Sizes, inline_share
from benchmarks.serving.search import (
    LOWEST_RATE,
    LengthSearch,
    Question,
    RateSearch,
    rate_of,
    take_turns,
)
from benchmarks.serving.server import RELAY, VARIANTS, Deployment, Variant
from benchmarks.serving.truncation import find_ratings, measure_auc
from benchmarks.serving.users import FIRST_ID, TASKS, Population
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.serving.engine.engine import Engine
from slipstream.training.run_directory import sole_user

PARTS = ("sessions", "no_reuse", "once", "longest", "ablations", "truncation", "recommend", "hit")
Figures = dict[str, Any]
# On two cores, from the rates and start times seen there; only the time left is told from it.
EXPECTED_MINUTES = dict(zip(PARTS, (48.0, 13.0, 11.0, 16.0, 11.0, 4.0, 5.0, 3.0), strict=True))


class OutOfTimeError(Exception):
    """The minutes given are over; the journal keeps what was made."""


@dataclass(frozen=True)
class Setting:
    """The sizes of a benchmark, full or quick."""

    model: dict[str, Any]
    lengths: tuple[int, ...]
    truncated: int  # behaviours of W4
    groups: dict[str, tuple[str, ...]]  # further variants by length
    reuse_lengths: tuple[int, ...]  # of trace N
    long: tuple[int, ...]  # behaviours that take long in line, each compared once
    users: int
    sizes: Sizes
    mix: int = 400
    candidates: tuple[int, int] = (100, 500)
    num_items: int = 5_000
    device_mb: int = 1_024
    host_mb: int = 4_096
    slo: float = 0.08
    longest_rate: float = 10.0
    longest_users: int = 1_400
    shortest: int = 256  # where the grid of lengths begins
    circle: int = 1_024
    overload: float = 1.5
    recommend_rate: float = 10.0


FULL = Setting(
    model={
        "kind": "hstu",
        "dim": 64,
        "blocks": 2,
        "heads": 2,
        "max_len": 6_144,
        "time_buckets": 64,
    },
    lengths=(384, 512, 768, 1_024),
    truncated=256,
    groups={"512": ("W3",), "1024": ("W3", "W2", "W4")},
    reuse_lengths=(512, 1_024),
    long=(3_072, 2_048),
    users=4_096,
    sizes=Sizes(),
)
QUICK = Setting(
    model={
        "kind": "hstu",
        "dim": 16,
        "blocks": 2,
        "heads": 2,
        "max_len": 256,
        "time_buckets": 32,
    },
    lengths=(64, 96),
    truncated=32,
    groups={"96": ("W3",)},
    reuse_lengths=(96,),
    long=(128,),
    users=600,
    sizes=Sizes(
        probe=60,
        verdict=480,  # with fewer LoadGen calls nothing VALID
        ablation=60,
        service=12,
        lead_in=10,
        attempts=1,
        climb=0,
        most_rate=60.0,
    ),
    mix=48,
    candidates=(20, 50),
    num_items=500,
    device_mb=16,
    host_mb=16,
    slo=1.0,
    longest_users=600,
    shortest=64,
    circle=64,
)


@dataclass(eq=False)
class ServingBench:
    """All parts over one work directory."""

    setting: Setting
    work: Path
    console: Console
    minutes: float | None = None
    lengths: tuple[str, ...] = ()  # of sessions and no_reuse; all unless given
    variants: tuple[str, ...] = ()
    figures: Figures = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ahead: float = 0.0  # minutes expected for the parts after the present one
    part_ends: float = 0.0  # when the present part is expected to end

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        logs = serving_trace.real_logs()
        self.logs = logs or [serving_trace.synthetic_log()]
        self.bundles = {False: self.work / "bundle", True: self.work / "bundle-truncated"}
        for truncated, path in self.bundles.items():
            self._write_bundle(path, truncated)
        setting = self.setting
        memory = ("--device-mb", str(setting.device_mb), "--host-mb", str(setting.host_mb))
        self.deployment = Deployment(self.work, self.bundles, memory)
        self.journal, self.witness = Journal(self.work / "runs.jsonl"), PauseWitness()
        self.runner = Runner(
            self.deployment,
            self.journal,
            self.logs,
            self.engine,
            slo=setting.slo,
            sizes=setting.sizes,
            kept_bytes=RELAY.instances * (setting.device_mb + setting.host_mb) << 20,
            witness=self.witness,
            log=self._note_run,
        )

    def take_over(self, result: Path) -> None:
        """Count what a result of this command holds as made here: its runs, and what W4 loses."""
        try:
            whole = read_json(result)
            kept = whole["rows"][0]["samples"]
            runs, found = kept["runs"], kept["figures"]
        except (KeyError, IndexError, TypeError):
            sentence = f"{result} is no result of `python -m benchmarks.serving`"
            raise SlipstreamError(sentence) from None
        for row in runs:
            if row["key"] not in self.journal.rows:
                self.journal.add({"commit": whole.get("commit"), **row})
        if "truncation" in found and not (self.work / "auc.json").is_file():
            write_json(self.work / "auc.json", found["truncation"])

    def _write_bundle(self, path: Path, truncated: bool) -> None:
        if path.is_dir():
            return
        model = dict(self.setting.model)
        if truncated:
            model["max_len"] = self.setting.truncated
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            random_bundle(
                Path(folder) / "bundle",
                model,
                tasks=TASKS,
                num_items=self.setting.num_items,
                first_id=FIRST_ID,
                noise=0.05,
            )
            shutil.move(Path(folder) / "bundle", path)

    @cache  # noqa: B019  one bench a process
    def engine(self, truncated: bool) -> Engine:
        """Return an engine to compare with."""
        import torch

        torch.set_num_threads(1)
        return Engine(self.bundles[truncated])

    # ---- what is asked ---------------------------------------------------------------------------

    def population(self, name: str) -> Population:
        """Return the users of a length, `mix` or `wide`."""
        users, items = self.setting.users, self.setting.num_items
        if name in ("mix", "wide"):
            sigma = 0.5 if name == "mix" else 1.0
            most = min(2_048, self.setting.model["max_len"] // 2)
            return Population(name, users, items, self.setting.mix, sigma, most)
        return Population(name, users, items, int(name))

    @cached_property
    def session_groups(self) -> dict[str, list[Variant]]:
        """Return the variants that each length compares on sessions."""
        names = [*map(str, self.setting.lengths), "mix"]
        found = {}
        for name in names:
            if self.lengths and name not in self.lengths:
                continue
            wanted = ("relay", "W1", *self.setting.groups.get(name, ()))
            found[name] = [
                VARIANTS[each] for each in wanted if not self.variants or each in self.variants
            ]
        return found

    # ---- parts -----------------------------------------------------------------------------------

    def sessions(self) -> None:
        """Compare the variants at every length on sessions."""
        for name, variants in self.session_groups.items():
            self._group(f"S {name}", Question(self.population(name), "S"), variants)

    def no_reuse(self) -> None:
        """Compare relay and in line where every user asks once."""
        for length in self.setting.reuse_lengths:
            name = str(length)
            if not self.lengths or name in self.lengths:
                variants = [VARIANTS["relay"], VARIANTS["W1"]]
                self._group(f"N {name}", Question(self.population(name), "N"), variants)

    def once(self) -> None:
        """Measure the wide mix, long histories and many candidates, one verdict each."""
        usual = self.population(str(self.setting.reuse_lengths[0]))
        questions = {"S wide": Question(self.population("wide"), "S")}
        for length in map(str, self.setting.long):
            questions[f"S {length}"] = Question(self.population(length), "S")
        questions["S many candidates"] = Question(usual, "S", self.setting.candidates[1])
        for label, question in questions.items():
            variants = [VARIANTS["relay"], VARIANTS["W1"]]
            search = RateSearch(self.runner, question, variants)
            levels = take_turns(self.runner.run, [search.first_valid(each) for each in variants])
            self.figures.setdefault("once", {})[label] = {
                variant.name: None if level is None else rate_of(level)
                for variant, level in zip(variants, levels, strict=True)
            }

    def longest(self) -> None:
        """Find the longest history at a fixed rate."""
        setting = self.setting
        search = LengthSearch(
            self.runner,
            setting.longest_rate,
            setting.longest_users,
            setting.num_items,
            setting.shortest,
            setting.model["max_len"] - 64,
        )
        begins = {"relay": 3 * setting.lengths[-1] // 2, "W1": setting.lengths[-1]}
        for name, begin in begins.items():
            [found] = take_turns(self.runner.run, [search.longest(VARIANTS[name], begin)])
            self.figures.setdefault("longest", {})[name] = found

    def ablations(self) -> None:
        """Switch trigger and host tier off where they must matter."""
        population = self.population(str(self.setting.lengths[-1]))
        rate = self._relay_rate(population)
        overload = RunPlan(RELAY, population, "S", self.setting.overload * rate, "ablation")
        self._ablate("trigger", overload, (), ("--no-trigger",))
        circle = replace(population, name=f"{population.name}C", users=self.setting.circle)
        bytes_each = self.engine(False).prefix_bytes(circle.length)
        device_mb = max(1, round(circle.users * bytes_each / 4 / RELAY.instances) >> 20)
        fixed = ("--device-mb", str(device_mb))
        live = RunPlan(RELAY, circle, "C", rate, "ablation")
        self._ablate("expander", live, fixed, (*fixed, "--host-mb", "0"))

    def _ablate(self, name: str, plan: RunPlan, on: tuple[str, ...], off: tuple[str, ...]) -> None:
        rows: dict[str, list[Row]] = {"with": [], "without": []}
        for number in range(1, 4):
            for word, flags in (("with", on), ("without", off)):
                label = f"{word} {name}"
                made = replace(plan, number=number, flags=flags, label=label)
                rows[word].append(self.runner.run(made))
        self.figures.setdefault("ablations", {})[name] = rows

    def _relay_rate(self, population: Population) -> float:
        """Return relay's rate on sessions, which must have been measured."""
        rates = self.figures.get("groups", {}).get(f"S {population.name}", {}).get("rates", {})
        if not rates.get("relay"):
            search = RateSearch(self.runner, Question(population, "S"), [RELAY])
            rates = search.rates()
        if not rates["relay"]:
            raise SlipstreamError("relay holds no rate at this length, so nothing can be ablated")
        return float(rates["relay"])

    def truncation(self) -> None:
        """Measure what W4 loses in quality, where the data are at hand."""
        kept = self.work / "auc.json"
        if not kept.is_file():
            source = find_ratings()
            if source is None:
                self.console.print("no MovieLens latest-small in $SLIPSTREAM_DATA: no AUC of W4")
                return
            self.deployment.close()
            lengths = (self.setting.truncated, self.setting.lengths[-1])
            epochs = 1 if self.setting is QUICK else 12
            write_json(kept, measure_auc(self.work / "auc", source, lengths, epochs))
        self.figures["truncation"] = read_json(kept)

    def recommend(self) -> None:
        """Compare the cascade of `/v1/recommend` with and without the relay."""
        population = self.population(str(self.setting.lengths[-1]))
        found: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(1, 4):
            for word, name in (("with", "relay"), ("without", "W1")):
                plan = RunPlan(
                    VARIANTS[name],
                    population,
                    "N",
                    self.setting.recommend_rate,
                    "recommend",
                    number,
                    self.setting.candidates[0],
                )
                p99 = self.runner.run(plan)["p99_ms"]
                found[word].append(float("inf") if p99 is None else p99)
        self.figures["recommend"] = {word: median(each) for word, each in found.items()}

    def hit(self) -> None:
        """Measure a served hit by its own benchmark."""
        from benchmarks.hit import run

        self.deployment.close()
        kept = self.work / "hit.json"
        if not kept.is_file():
            run(self.setting is QUICK, kept)
        self.figures["hit"] = read_json(kept)

    def _group(self, label: str, question: Question, variants: Sequence[Variant]) -> None:
        """Search the rates of variants that answer one question, and compare with ideal queues."""
        search = RateSearch(self.runner, question, variants)
        rates = search.rates()
        ideal = {}
        for variant in variants:
            rate = rates[variant.name]
            if rate is None:
                continue
            rows = search.verdicts(variant, rate)
            inline = sum(inline_share(row) for row in rows) / len(rows)
            computed = sum(row["computed_share"] for row in rows) / len(rows)
            shares = min(1.0 - inline, computed), inline
            ideal[variant.name] = search.ideal_rate(variant, *shares)
        returning = self._returning(question, max((rate or 0.0) for rate in rates.values()))
        group = {"rates": rates, "ideal": ideal, "returning": returning}
        self.figures.setdefault("groups", {})[label] = group

    def _returning(self, question: Question, rate: float) -> float:
        """Return the share of requests whose user has asked before."""
        plan = question.plan(RELAY, rate or LOWEST_RATE, 1, "verdict")
        requests = self.runner.window(plan, self.setting.sizes.verdict, 1).requests
        return sum(request.again for request in requests) / len(requests)

    # ---- progress --------------------------------------------------------------------------------

    def _note_run(self, sentence: str) -> None:
        now = time.monotonic()
        spent = (now - self.began) / 60
        left = self.ahead + max(0.0, self.part_ends - now) / 60
        self.console.print(
            f"{spent:.1f} min, about {left:.0f} left: {sentence}", style="dim", markup=False
        )
        if self.minutes is not None and spent > self.minutes:
            raise OutOfTimeError

    def expected_minutes(self, part: str) -> float:
        """Return about how long a part takes where nothing is in the journal."""
        minutes = EXPECTED_MINUTES[part] * (0.1 if self.setting is QUICK else 1.0)
        if part == "sessions":
            every = len(self.setting.lengths) + 1
            asked = sum(len(variants) for variants in self.session_groups.values())
            full = 2 * every + sum(map(len, self.setting.groups.values()))
            return minutes * asked / full
        return minutes

    def run_parts(self, parts: Sequence[str]) -> bool:
        """Measure parts one after the other; False where the minutes were over before the end."""
        work: dict[str, Callable[[], None]] = {name: getattr(self, name) for name in PARTS}
        try:
            self.figures["noise_floor_ms"] = noise_floor()
            with sole_user(self.work), self.witness:
                if not self.witness.watching:
                    self.console.print(
                        "only root sees when this machine pauses; no run is repeated"
                    )
                for place, part in enumerate(parts):
                    self.ahead = sum(self.expected_minutes(each) for each in parts[place + 1 :])
                    self.part_ends = time.monotonic() + 60 * self.expected_minutes(part)
                    self.console.print(f"{part}: part {place + 1} of {len(parts)}")
                    work[part]()
        except OutOfTimeError:
            self.console.print("the minutes are over; the same command goes on from here")
            return False
        finally:
            self.deployment.close()
        return True
