"""The laws of growth from NestPipe's rows of 128 and 256 workers, as the protocol fixes them.

Everything is in milliseconds; TorchRec's step at 128 workers is 512 x 128 samples over its
throughput. Touch this only together with benchmarks/protocols/simulate.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.simulate import papers
from slipstream.simulate.cluster import Cluster
from slipstream.simulate.growth_laws import GrowthLaw, Shape, law_through
from slipstream.simulate.step_times import LOOKUP_SPLIT, PhaseTimes
from slipstream.simulate.training_simulation import simulate_training

NESTED_PARTS = 8
FIRST, SECOND = papers.CALIBRATION
Interval = tuple[float, float]


@dataclass(frozen=True)
class Choices:
    """The assumptions that two rows cannot decide; the defaults are the protocol's."""

    lookup: Shape = "linear"
    exchange: Shape = "linear"
    groups_shorten_all: bool = True  # False: only the part that grows with the peers
    between_grows: bool = True
    dense_share: float = 0.0  # of communication, not hidden
    lookup_split: Mapping[str, float] = field(default_factory=lambda: dict(LOOKUP_SPLIT))


@dataclass(frozen=True)
class Laws:
    """Calibrated laws, in milliseconds."""

    compute: float
    lookup: GrowthLaw
    exchange: GrowthLaw
    between: GrowthLaw  # for one further group
    residual_nested: float
    residual_uniemb: float
    steps_128: dict[str, float]  # of each system, as its rounded rows allow
    choices: Choices

    def phases(self, *, residual: float, between_at_end: bool = False) -> PhaseTimes:
        """Return a step by these laws."""
        dense = self.choices.dense_share
        return PhaseTimes(
            compute=GrowthLaw(shape="constant", constant=self.compute),
            lookup=self.lookup,
            exchange=scaled(self.exchange, 1 - dense),
            between_groups=self.between,
            dense=scaled(self.exchange, dense),
            overhead=GrowthLaw(shape="constant", constant=residual),
            lookup_split=dict(self.choices.lookup_split),
            between_at_end=between_at_end,
            samples=papers.SAMPLES,
        )


def scaled(law: GrowthLaw, factor: float) -> GrowthLaw:
    """Return a law times a factor."""
    grown = law.factor if law.shape == "power" else factor * law.factor
    return GrowthLaw(shape=law.shape, constant=factor * law.constant, factor=grown)


def _rounded(value: float, digits: int = 2) -> Interval:
    half = 0.5 * 10.0**-digits
    return value - half, value + half


def _own_interval(system: str) -> Interval:
    """Return what a system's two rounded throughputs and its scaling allow at 128 workers."""
    row = papers.NESTPIPE[system]
    low, high = _rounded(row.throughput[FIRST])
    grown = SECOND / FIRST * row.efficiency[SECOND]
    later = [value / grown for value in _rounded(row.throughput[SECOND])]
    return max(low, later[0]), min(high, later[1])


def steps_at_128() -> dict[str, float]:
    """Return each system's milliseconds at 128 workers: the middle of what its rows allow."""
    found = {system: _own_interval(system) for system in papers.NESTPIPE}
    # Both compute equally long, so their throughputs are as their compute shares.
    least = (papers.COMPUTE_SHARE - 5e-4) / (papers.COMPUTE_SHARE_2D + 5e-4)
    most = (papers.COMPUTE_SHARE + 5e-4) / (papers.COMPUTE_SHARE_2D - 5e-4)
    flat, groups = found["TorchRec"], found["2D-SP"]
    flat = max(flat[0], least * groups[0]), min(flat[1], most * groups[1])
    groups = max(groups[0], flat[0] / most), min(groups[1], flat[1] / least)
    found |= {"TorchRec": flat, "2D-SP": groups}
    samples = FIRST * papers.SAMPLES
    return {name: 1e3 * samples / (1e5 * (low + high) / 2) for name, (low, high) in found.items()}


def growth(system: str, step: float) -> float:
    """Return the milliseconds by which a system's step grows from 128 to 256 workers."""
    return step * (1 / papers.NESTPIPE[system].efficiency[SECOND] - 1)


def calibrate(choices: Choices | None = None) -> Laws:
    """Return the laws through the rows of 128 and 256 workers."""
    choices = choices or Choices()
    steps = steps_at_128()
    whole = steps["TorchRec"]
    compute, lookup, comm = (
        share * whole for share in (papers.COMPUTE_SHARE, papers.LOOKUP_SHARE, papers.COMM_SHARE)
    )
    comm_growth = growth("UniEmb", steps["UniEmb"])
    lookup_growth = growth("TorchRec", whole) - comm_growth
    exchange = law_through(choices.exchange, (FIRST, comm), (SECOND, comm + comm_growth))
    lookup_law = law_through(choices.lookup, (FIRST, lookup), (SECOND, lookup + lookup_growth))
    between = _between(choices, steps["2D-SP"], compute, lookup_law, exchange)
    laws = Laws(compute, lookup_law, exchange, between, 0.0, 0.0, steps, choices)
    unexplained = {}
    for system, closed in (("UniEmb", True), ("NestPipe", False)):
        left = []
        for workers in papers.CALIBRATION:
            grown = 1.0 if workers == FIRST else 1 / papers.NESTPIPE[system].efficiency[workers]
            simulated = (
                compute + exchange.at(workers) if closed else nested_step(laws, workers, residual=0)
            )
            left.append(steps[system] * grown - simulated)
        unexplained[system] = sum(left) / len(left)
    return Laws(
        compute,
        lookup_law,
        exchange,
        between,
        unexplained["NestPipe"],
        unexplained["UniEmb"],
        steps,
        choices,
    )


def in_groups(laws: Laws | Choices, exchange: GrowthLaw, workers: int, groups: int) -> float:
    """Return the milliseconds of an exchange within one of several groups."""
    choices = laws.choices if isinstance(laws, Laws) else laws
    if choices.groups_shorten_all:
        return exchange.at(workers) / groups
    return exchange.at(workers / groups)


def _between(
    choices: Choices, step: float, compute: float, lookup: GrowthLaw, exchange: GrowthLaw
) -> GrowthLaw:
    """Return the exchange between groups, for one further group, from 2D-SP's two rows."""
    left = {}
    for workers in papers.CALIBRATION:
        grown = 1.0 if workers == FIRST else 1 / papers.NESTPIPE["2D-SP"].efficiency[workers]
        known = compute + lookup.at(workers) + in_groups(choices, exchange, workers, papers.GROUPS)
        left[workers] = (step * grown - known) / (papers.GROUPS - 1)
    if not choices.between_grows:
        mean = max(0.0, sum(left.values()) / len(left))
        return GrowthLaw(shape="constant", constant=mean)
    factor = sum(n * value for n, value in left.items()) / sum(n * n for n in left)
    return GrowthLaw(shape="linear", factor=max(0.0, factor))


def nested_step(
    laws: Laws, workers: int, *, groups: int = 1, residual: float | None = None
) -> float:
    """Return NestPipe's simulated milliseconds: `nested` with 8 equal micro-batches."""
    rest = laws.residual_nested if residual is None else residual
    phases = _within(laws, laws.phases(residual=max(0.0, rest)), workers, groups)
    cluster = Cluster(name="nestpipe", phases=phases, taper=1.0)
    report = simulate_training(
        cluster, "nested", workers=workers, replicas=groups, micro_batches=NESTED_PARTS, steps=6
    )
    return 1e3 * report.step_seconds + min(0.0, rest)


def serial_step(laws: Laws, workers: int, groups: int = 1) -> float:
    """Return the simulated milliseconds of TorchRec (one group) or 2D-SP (four)."""
    phases = _within(laws, laws.phases(residual=0.0), workers, groups)
    cluster = Cluster(name="serial", phases=phases)
    report = simulate_training(cluster, "serial", workers=workers, replicas=groups, steps=4)
    return 1e3 * report.step_seconds


def _within(laws: Laws, phases: PhaseTimes, workers: int, groups: int) -> PhaseTimes:
    """Return the phases with the exchange that a group has under the laws' assumption."""
    if groups == 1 or laws.choices.groups_shorten_all:
        return phases
    whole = groups * in_groups(laws, laws.exchange, workers, groups)
    exchange = GrowthLaw(shape="constant", constant=(1 - laws.choices.dense_share) * whole)
    return phases.model_copy(update={"exchange": exchange})
