"""The settings of an instance, and what it returns.

Touch this to add a setting; `slipstream serve` takes them by these names.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.serving.engine.prefix import PrefixKey
from slipstream.serving.instance.trigger import TriggerConfig

Hit = Literal["device", "host", "joined", "extended", "inline"]  # where a prefix was found


@dataclass(frozen=True)
class InstanceConfig:
    """One instance: its memory, its time limits, and which parts of the relay race take part."""

    device_bytes: int = 512 << 20  # prefix cache, allocated at start
    host_bytes: int = 512 << 20  # expander, allocated at start; 0: none
    # Shared-memory file that outlives the process; None: no expander.
    host_path: str | Path | None = None
    # Seconds the ranking stage may take: what "at risk" is measured against.
    ranking_budget: float = 0.08
    # Seconds from a pre-inference signal to its ranking, unless the signal has its own.
    rank_in: float = 0.1
    pin_grace: float = 1.0  # seconds a prefix is kept beyond the expected ranking
    expected_candidates: int = 100  # candidates of a typical request
    max_candidates: int = 10_000
    # Behaviours a ranking request computes behind a shorter prefix, rather than extend it first.
    max_tail: int = 64
    max_jobs: int = 512  # queued work; beyond it requests are refused
    max_batch: int = 8
    max_copies: int = 8  # demotions waiting at a time
    slice_seconds: float = 0.008  # longest step of a pre-inference, as predicted
    calibrate_seconds: float = 1.5  # time spent measuring the machine at start
    threads: int = 1  # torch threads of this process
    # False: every request in line, nothing kept: the system without the relay race.
    relay: bool = True
    preinfer: bool = True  # False: prefixes are kept after ranking, but never computed ahead
    trigger: TriggerConfig = field(default_factory=TriggerConfig)


@dataclass(frozen=True)
class Admission:
    """The answer to a pre-inference signal.

    The reason of an admitted one is admitted, device, joined or extended.
    """

    admitted: bool
    reason: str
    key: PrefixKey | None
    tokens: int


@dataclass(frozen=True)
class RankResult:
    """Scores by task, in the order of the candidates, and where the prefix was found."""

    scores: dict[str, np.ndarray]
    hit: Hit
    truncated: bool
    version: str
