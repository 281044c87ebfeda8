"""The ways of training that the study compares: changes to a recipe, and whose bits must be equal.

Touch this to add a schedule to the study.
"""

from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import SlipstreamError, did_you_mean

MICRO_BATCHES = 4  # how the cutting schedules cut
PARTNER_SEEDS = 2
LATE_STEPS = 100  # when staleness begins in the variant that begins without


@dataclass(frozen=True)
class Variant:
    """One way of training; `turn` is its place in the order, the most telling first."""

    name: str
    about: str
    turn: int
    settings: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # section -> key -> value of the recipe
    ranks: int = 1
    staleness: int = 0  # steps by which rows may be old
    same_bits_as: str | None = None
    plain_cut: bool = False  # done by the study's own loop, not by a schedule
    most_seeds: int | None = (
        None  # a partner that is there to compare bits with needs no statistics
    )

    @property
    def exact(self) -> bool:
        """Whether it promises the synchronous result, up to the order of sums."""
        return self.staleness == 0 and "averaged" not in self.name


def _stale(steps: int, turn: int) -> Variant:
    return Variant(
        f"semi_async_{steps}",
        f"rows {steps} step{'s' if steps > 1 else ''} old",
        turn,
        {"train": {"schedule": "semi_async", "staleness": steps}},
        staleness=steps,
    )


def _averaged(every: int, turn: int) -> Variant:
    return Variant(
        f"averaged_{every}",
        f"2D-SP: two replicas, averaged every {'step' if every == 1 else f'{every} steps'}",
        turn,
        {"train": {"mesh": "2x1"}, "tables": {"replicas": "averaged", "average_every": every}},
        ranks=2,
    )


BASELINE = "synchronous"
VARIANTS = (  # in the order of the tables; `turn` is the order of training
    Variant(BASELINE, "the plain loop", 0),
    Variant(
        "dual_buffer",
        "rows prefetched into a second buffer",
        3,
        {"train": {"schedule": "dual_buffer"}},
        same_bits_as=BASELINE,
    ),
    Variant(
        "nested",
        f"prefetched, {MICRO_BATCHES} micro-batches",
        3,
        {"train": {"schedule": "nested", "micro_batches": MICRO_BATCHES}},
        same_bits_as="plain_cut",
    ),
    Variant(
        "plain_cut",
        f"the plain loop over the same {MICRO_BATCHES} micro-batches",
        3,
        {"train": {"micro_batches": MICRO_BATCHES}},
        plain_cut=True,
        most_seeds=PARTNER_SEEDS,
    ),
    Variant(
        "hsp",
        "two replicas, gradients summed",
        5,
        {"train": {"mesh": "2x1"}},
        ranks=2,
        same_bits_as="one_replica",
    ),
    Variant(
        "one_replica",
        "one table shared by two ranks",
        5,
        {"train": {"mesh": "1x2"}},
        ranks=2,
        most_seeds=PARTNER_SEEDS,
    ),
    _stale(1, 0),
    _stale(2, 2),
    _stale(4, 1),
    Variant(
        "semi_async_1_late",
        f"rows 1 step old, after {LATE_STEPS} synchronous steps",
        3,
        {"train": {"schedule": "semi_async", "staleness": 1, "synchronous_steps": LATE_STEPS}},
        staleness=1,
    ),
    _averaged(1, 4),
    _averaged(16, 4),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}
STALE = (BASELINE, "semi_async_1", "semi_async_2", "semi_async_4")


def named_variants(names: tuple[str, ...]) -> tuple[Variant, ...]:
    """Return variants by name, with the baseline."""
    for name in names:
        if name not in BY_NAME:
            raise SlipstreamError(f"unknown variant '{name}'{did_you_mean(name, BY_NAME)}")
    return tuple(variant for variant in VARIANTS if variant.name in (BASELINE, *names))
