"""The recorded benchmarks: how each is run, how long it takes, and what a change must not worsen.

Touch this when a benchmark is added, or when another figure of one should be held.
evidence_run.py runs them.
"""

from dataclasses import dataclass
from typing import Literal

FELL = 0.25  # a ratio of times may be worse by this much before the check names it


@dataclass(frozen=True)
class Held:
    """A claim that the check compares with the recorded one.

    A time depends on sizes, so it is compared with a recorded quick run. A claim of `any_size` is
    compared with the full result where no quick run is recorded.
    """

    name: str
    better: Literal["higher", "lower"]
    tolerance: float = FELL  # share of the recorded value
    any_size: bool = False

    def worst(self, recorded: float) -> float:
        """Return the worst value that still counts as equal."""
        change = self.tolerance * abs(recorded)
        return recorded - change if self.better == "higher" else recorded + change

    def fell(self, recorded: float, found: float) -> bool:
        """Whether a figure is worse than the recorded one by more than the tolerance."""
        worst = self.worst(recorded)
        kept = found >= worst if self.better == "higher" else found <= worst
        return not kept  # a figure that is no number has fallen


def higher(*names: str) -> tuple[Held, ...]:
    """Hold claims that must not get smaller."""
    return tuple(Held(name, "higher") for name in names)


def lower(*names: str) -> tuple[Held, ...]:
    """Hold claims that must not get larger."""
    return tuple(Held(name, "lower") for name in names)


def exactly(better: Literal["higher", "lower"], *names: str) -> tuple[Held, ...]:
    """Hold claims that may not get worse at all, whatever the sizes."""
    return tuple(Held(name, better, 0.0, any_size=True) for name in names)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: the words after `python -m`, the code it measures with, minutes it takes.

    `sources` are paths under the root; the protocol is added to them. One that takes hours is run
    only when it is named.
    """

    name: str
    words: tuple[str, ...]
    sources: tuple[str, ...]
    minutes: int
    held: tuple[Held, ...] = ()
    only_named: bool = False

    @property
    def protocol(self) -> str:
        """The path of the protocol under the root."""
        return f"benchmarks/protocols/{self.name}.md"


def comparison(name: str, minutes: int, *held: Held, file: bool = False) -> Benchmark:
    """Return a benchmark of this folder: a package, or one file."""
    path = f"benchmarks/{name}.py" if file else f"benchmarks/{name}"
    return Benchmark(name, (f"benchmarks.{name}",), (path,), minutes, held)


def study(name: str, minutes: int, *words: str) -> Benchmark:
    """Return a package of this folder that takes hours; it keeps what is done and goes on."""
    command = (f"benchmarks.{name}", *words)
    return Benchmark(name, command, (f"benchmarks/{name}",), minutes, only_named=True)


def measurement(name: str, module: str, minutes: int, *held: Held) -> Benchmark:
    """Return a measurement that users make with `slipstream bench`."""
    words = ("slipstream", "bench", name.replace("_", "-"))
    return Benchmark(name, words, (f"src/slipstream/bench/{module}.py",), minutes, held)


BENCHMARKS = (
    comparison("startup", 2, *lower("help_vs_python", "import_vs_python"), file=True),
    measurement("ingest", "ingest_rate", 4),
    measurement("kernels", "kernels", 10, *higher("mfu_4x64_bias", "mfu_2x32_bias")),
    measurement("pointwise", "pointwise_rate", 3, *higher("full_softmax_speedup")),
    measurement(
        "train_step",
        "train_step",
        45,
        *higher("x_over_padded_ml1m", "negative_memory_saved"),
    ),
    comparison("before_after", 8, *higher("ml_1m_hstu_step_1_speedup", "full_softmax_1_speedup")),
    comparison(
        "tables",
        8,
        *lower("gather_vs_index_select"),
        *higher("update_speedup", "update_vs_indexing"),
    ),
    comparison(
        "exchange",
        3,
        *lower("bytes_vs_torchrec", "time_vs_torchrec"),
        *exactly("lower", "formula_error", "hsp_formula_error"),
    ),
    comparison(
        "negatives",
        15,
        *higher("segmented_memory_saved"),
        *lower("segmented_step_ratio", "segmented_vs_fused", "share_k4_step_ratio"),
        *exactly("lower", "extra_lookups"),
    ),
    comparison("balance", 15, *lower("imbalance_flops")),
    comparison("disk_table", 5, file=True),
    comparison("pipeline", 45, *exactly("lower", "max_diff_same_cut", "max_diff_uncut")),
    comparison("auto_schedule", 50),
    comparison("checkpoint", 10, file=True),
    comparison("full_recipes", 75, file=True),
    comparison("large_catalogue", 40, file=True),
    comparison("ranking", 15),
    comparison("hit", 5, *lower("hit_vs_engine_1024"), file=True),
    comparison("kv_precision", 4, *exactly("higher", "paths_equal"), file=True),
    comparison("recommend", 10, *exactly("higher", "topk_equal")),
    comparison("page_speed", 3, file=True),
    comparison("attack", 8),
    comparison("chaos", 20),
    comparison("simulate", 5),
    comparison("serving", 110),
    study("reproduce", 150, "ml-1m", "threads=1", "--jobs", "2"),
    study("arena", 1500),
)
