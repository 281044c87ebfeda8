"""The settings of an instance, and what it returns.

Touch this to add a setting; `instance_settings` makes them from the flags of `slipstream serve`.
Nothing here imports torch, so that commands start fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slipstream.serving.instance.trigger import TriggerConfig

if TYPE_CHECKING:
    from slipstream.ops.kv_precision import KVPrecision
    from slipstream.serving.engine.prefix import PrefixKey

SEARCHES = ("exact", "hnsw", "ivf")  # ways to search a catalogue
Hit = Literal["device", "host", "joined", "extended", "inline"]  # where a prefix was found


@dataclass(frozen=True)
class InstanceConfig:
    """One instance: its memory, its time limits, and which parts of the relay race take part."""

    device_bytes: int = 512 << 20  # prefix cache; memory is taken as it fills
    host_bytes: int = 512 << 20  # most of the expander, which grows as it fills; 0: none
    # Shared-memory file that outlives the process; None: no expander.
    host_path: str | Path | None = None
    # Seconds the ranking stage may take: what "at risk" is measured against.
    ranking_budget: float = 0.08
    # Seconds from a pre-inference signal to its ranking, unless the signal has its own.
    rank_in: float = 0.1
    pin_grace: float = 1.0  # seconds a prefix is kept beyond the expected ranking
    max_pin: float = 5.0  # most seconds a prefix is kept for a ranking, whatever was announced
    expected_candidates: int = 100  # candidates of a typical request
    max_candidates: int = 10_000
    # Behaviours a ranking request computes behind a shorter prefix, rather than extend it first.
    max_tail: int = 64
    max_jobs: int = 512  # queued work; beyond it requests are refused
    max_batch: int = 8
    max_copies: int = 8  # demotions waiting at a time
    slice_seconds: float = 0.008  # longest step of a pre-inference, as predicted
    longest_pass: float = 0.024  # of a ranking that computes its history and keeps the prefix
    calibrate_seconds: float = 1.5  # time spent measuring the machine at start
    threads: int = 1  # torch threads of this process
    # How both tiers store keys and values: exact, at half, or at about a quarter of the size.
    kv_precision: "KVPrecision" = "fp32"
    # False: every request in line, nothing kept: the system without the relay race.
    relay: bool = True
    preinfer: bool = True  # False: prefixes are kept after ranking, but never computed ahead
    search: str = "exact"  # of the catalogue; or an approximate index: hnsw, ivf
    trigger: TriggerConfig = field(default_factory=TriggerConfig)

    @classmethod
    def of(cls, settings: Mapping[str, Any], **more: Any) -> "InstanceConfig":
        """Make a config of JSON values, as `instance_settings` returns them, and further fields."""
        trigger = TriggerConfig(**settings.get("trigger", {}))
        return cls(**{**settings, "trigger": trigger, **more})


def instance_settings(
    *,
    threads: int = 1,
    device_mb: int = 512,
    host_mb: int = 512,
    kv: str = "fp32",
    slo_ms: float = 80.0,
    relay: bool = True,
    preinfer: bool = True,
    trigger: bool = True,
    search: str = "exact",
) -> dict[str, Any]:
    """Return the fields of an `InstanceConfig` as JSON values, from the flags of a command."""
    return {
        "threads": threads,
        "device_bytes": device_mb << 20,
        "host_bytes": host_mb << 20,
        "kv_precision": kv,
        "ranking_budget": slo_ms / 1000,
        "relay": relay,
        "preinfer": preinfer,
        "search": search,
        "trigger": {"enabled": trigger},
    }


@dataclass(frozen=True)
class Admission:
    """The answer to a pre-inference signal.

    The reason of an admitted one is admitted, device, joined or extended.
    """

    admitted: bool
    reason: str
    key: "PrefixKey | None"
    tokens: int


@dataclass(frozen=True)
class RankResult:
    """Scores by task, in the order of the candidates, and where the prefix was found.

    `kept`: whether a prefix of the user is in the cache now.
    """

    scores: dict[str, np.ndarray]
    hit: Hit
    truncated: bool
    version: str
    kept: bool = True
