"""A cluster file: devices, hosts, links, and what a step does there. YAML, checked when it is read.

A file describes either the work (`workload`: model, batch, keys), from which the times of a step
are computed, or these times themselves (`phases`), as a paper prints them or a bench measured
them. Touch this when a cluster gets another property.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slipstream.config import check
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.simulate.step_times import PhaseTimes
from slipstream.simulate.workload import Workload

CLUSTERS = Path(__file__).parent / "clusters"
MAX_WORKERS = 65_536


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceSpec(_Section):
    """One accelerator, or the cores of one rank."""

    teraflops: float = Field(default=100.0, gt=0, description="peak of the matrix products in use")
    efficiency: float = Field(
        default=0.4, gt=0, le=1, description="share of the peak that a model reaches"
    )
    call_us: float = Field(
        default=200.0, ge=0, description="microseconds a micro-batch costs by itself"
    )
    memory_gb: float = Field(default=64.0, gt=0, description="memory of the device")
    memory_gb_per_s: float = Field(default=1000.0, gt=0, description="bandwidth of its memory")
    host_gb_per_s: float = Field(
        default=20.0, gt=0, description="bandwidth between host and device"
    )
    dollars_per_hour: float = Field(default=2.0, ge=0, description="price, for plans")


class HostSpec(_Section):
    """What a host does for each of its devices."""

    memory_gb: float = Field(
        default=128.0, gt=0, description="memory for tables, of each device's share"
    )
    row_ns: float = Field(
        default=150.0, ge=0, description="read a row, or write one, in nanoseconds"
    )
    key_ns: float = Field(default=40.0, ge=0, description="deduplicate and place a key")
    list_us: float = Field(
        default=5.0, ge=0, description="take the keys of one more worker, microseconds"
    )
    request_us: float = Field(
        default=600.0, ge=0, description="of an instance, a request besides its pass"
    )


class LinkSpec(_Section):
    """A link of one device."""

    gb_per_s: float = Field(gt=0, description="bytes a device sends, in gigabytes a second")
    latency_us: float = Field(default=10.0, ge=0, description="of one message")
    incast: float = Field(
        default=0.0,
        ge=0,
        description="share of bandwidth lost with every further sender to a receiver",
    )


class Spread(_Section):
    """How unequal workers are, beyond their batches: coefficients of variation."""

    compute: float = Field(default=0.0, ge=0, lt=1, description="of compute, anew in every step")
    slowest: float = Field(
        default=0.0,
        ge=0,
        lt=10,
        description="by how much one worker in a hundred is slower, always",
    )


class Cluster(_Section):
    """Devices, hosts and links, with the work or the times of a step."""

    name: str = Field(default="cluster", description="shown in tables and plots")
    workers: int = Field(default=8, ge=1, le=MAX_WORKERS, description="devices that train")
    replicas: int = Field(
        default=1, ge=1, description="copies of the tables; workers / replicas shards"
    )
    devices_per_node: int = Field(
        default=8, ge=1, description="devices joined by the node's own link"
    )
    device: DeviceSpec = DeviceSpec()
    host: HostSpec = HostSpec()
    node: LinkSpec = LinkSpec(gb_per_s=100.0, latency_us=1.0)
    network: LinkSpec = LinkSpec(gb_per_s=12.5, latency_us=3.0)
    spread: Spread = Spread()
    taper: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="size of the first and last micro-batch beside the others",
    )
    workload: Workload | None = None
    phases: PhaseTimes | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Cluster":
        if (self.workload is None) == (self.phases is None):
            raise ValueError("give either workload or phases")
        return self

    @property
    def samples(self) -> int:
        """Samples of a worker and step."""
        source = self.workload or self.phases
        assert source is not None
        return source.samples


def open_cluster(source: "Cluster | str | Path | dict[str, Any]") -> Cluster:
    """Return a cluster from a file, from the name of one that ships, or from values."""
    if isinstance(source, Cluster):
        return source
    if isinstance(source, dict):
        return check(Cluster, source, "the cluster")
    path = _cluster_path(source)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SlipstreamError(
            f"cluster file {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, dict):
        raise SlipstreamError(f"cluster file {path} must be a mapping of keys to values")
    return check(Cluster, {"name": path.stem} | values, str(source))


def shipped_clusters() -> list[str]:
    """Return the names of the cluster files that ship."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def _cluster_path(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if len(path.parts) == 1 and path.stem in shipped_clusters() and path.suffix in ("", ".yaml"):
        return CLUSTERS / f"{path.stem}.yaml"
    raise SlipstreamError(
        f"there is no cluster file '{source}'{did_you_mean(str(source), shipped_clusters())}; "
        f"give a path, or one that ships: {', '.join(shipped_clusters())}"
    )
