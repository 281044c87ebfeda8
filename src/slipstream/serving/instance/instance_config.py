"""The settings of an instance, and what it answers with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.serving.engine.prefix import PrefixKey
from slipstream.serving.instance.trigger import TriggerConfig

Hit = Literal["device", "host", "joined", "extended", "inline"]


@dataclass(frozen=True)
class InstanceConfig:
    """One instance: its memory, its promises, and which parts of the relay race take part."""

    device_bytes: int = 512 << 20  # prefix cache, allocated at start
    host_bytes: int = 512 << 20  # expander, allocated at start; 0: none
    host_path: str | Path | None = (
        None  # shared-memory file that outlives the process; None: no expander
    )
    ranking_budget: float = (
        0.08  # seconds the ranking stage may take: what "at risk" is measured against
    )
    rank_in: float = (
        0.1  # seconds from a pre-inference signal to its ranking, where the signal does not say
    )
    pin_grace: float = 1.0  # seconds a prefix is kept beyond the expected ranking
    expected_candidates: int = 100  # candidates of a typical request
    max_candidates: int = 10_000
    # behaviours a ranking request computes behind a shorter prefix, rather than extend it first
    max_tail: int = 64
    max_jobs: int = 512  # queued work; beyond it requests are refused
    max_batch: int = 8
    max_copies: int = 8  # demotions waiting at a time
    slice_seconds: float = 0.008  # longest step of a pre-inference, as predicted
    calibrate_seconds: float = 1.5  # time spent measuring the machine at start
    threads: int = 1  # torch threads of this process
    relay: bool = (
        True  # False: every request in line, nothing kept: the system without the relay race
    )
    preinfer: bool = True  # False: prefixes are kept after ranking, but never computed ahead
    trigger: TriggerConfig = field(default_factory=TriggerConfig)


@dataclass(frozen=True)
class Admission:
    """The answer to a pre-inference signal. Admitted reasons: admitted, device, joined, extended;
    else why not.
    """

    admitted: bool
    reason: str
    key: PrefixKey | None
    tokens: int


@dataclass(frozen=True)
class RankAnswer:
    """Scores by task, in the order of the candidates, and where the prefix came from."""

    scores: dict[str, np.ndarray]
    hit: Hit
    truncated: bool
    version: str
