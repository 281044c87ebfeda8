"""The times of a step from a description of the hardware and of the work: bytes, rows and FLOPs.

    all-to-all   messages to every peer of the group x latency, and the bytes that leave the device
                 over the bandwidth of the link they take (the node's own, or the network)
    all-reduce   a ring within the nodes and between them: 2 (n - 1) / n of the bytes
    lookup       rows x the time of a row, keys x the time of a key, a list from every requester

Touch this when a stage moves other bytes. The laws are simple on purpose: with measured times at
hand, give `phases` instead.
"""

from dataclasses import dataclass

from slipstream.models.flops import backbone_flops
from slipstream.pipeline.schedule import Schedule
from slipstream.simulate.cluster import Cluster
from slipstream.simulate.lane_clock import Among, ExchangeTime
from slipstream.simulate.step_times import StageSeconds
from slipstream.simulate.workload import Workload

KEY_BYTES = 8


@dataclass(frozen=True)
class GroupLinks:
    """The links of a group of devices that exchange with each other."""

    cluster: Cluster
    members: int
    neighbours: int  # members on one node, the device itself included

    @classmethod
    def of(cls, cluster: Cluster, members: int, spacing: int = 1) -> "GroupLinks":
        """Return the links of members whose ranks lie `spacing` apart."""
        near = max(1, cluster.devices_per_node // spacing)
        return cls(cluster, members, min(near, members))

    def all_to_all(self, among: Among, nbytes: float) -> ExchangeTime:
        """Return the exchange in which each member sends `nbytes` to all others together."""
        near, far = self.neighbours - 1, self.members - self.neighbours
        peers = max(1, near + far)
        return self._exchange(among, nbytes * near / peers, nbytes * far / peers, near, far)

    def share(self, among: Among, nbytes: float) -> ExchangeTime:
        """Return the exchange in which each member sends the same `nbytes` to every other."""
        near, far = self.neighbours - 1, self.members - self.neighbours
        return self._exchange(among, nbytes * near, nbytes * far, near, far)

    def all_reduce(self, among: Among, nbytes: float) -> ExchangeTime:
        """Return the sum of `nbytes` over all members, a ring in the nodes and between them."""
        if self.members == 1:
            return ExchangeTime(among)
        node, network = self.cluster.node, self.cluster.network
        nodes = -(-self.members // self.neighbours)
        inside = 2 * (self.neighbours - 1) / self.neighbours * nbytes / (node.gb_per_s * 1e9)
        outside = 2 * (nodes - 1) / nodes * nbytes / self.neighbours / (network.gb_per_s * 1e9)
        steps = 2 * (self.neighbours - 1) * node.latency_us + 2 * (nodes - 1) * network.latency_us
        return ExchangeTime(among, inside + outside, steps * 1e-6)

    def _exchange(
        self, among: Among, near_bytes: float, far_bytes: float, near: int, far: int
    ) -> ExchangeTime:
        node, network = self.cluster.node, self.cluster.network
        inside = near_bytes / (node.gb_per_s * 1e9)
        outside = far_bytes * (1 + network.incast * max(0, far - 1)) / (network.gb_per_s * 1e9)
        latency = near * node.latency_us + far * network.latency_us
        return ExchangeTime(among, max(inside, outside), latency * 1e-6)


def hardware_stages(
    cluster: Cluster, work: Workload, schedule: Schedule, shards: int, replicas: int
) -> dict[str, StageSeconds]:
    """Return the stages of a step on shards x replicas workers."""
    host, device = cluster.host, cluster.device
    group = GroupLinks.of(cluster, shards)
    copies = GroupLinks.of(cluster, replicas, spacing=shards)
    everybody = GroupLinks.of(cluster, shards * replicas)
    inflation = work.inflation(schedule.micro_batches)
    asked = work.keys()  # keys a worker asks for, and an owner is asked for
    sent = asked * inflation * work.row_bytes
    owned = work.keys(shards) / shards  # different ones at an owner
    touched = work.keys(shards * replicas) / shards  # different ones of all replicas
    read = touched * (1 - work.overlap(shards * replicas) * bool(schedule.buffers_ahead))
    row_seconds, memory = host.row_ns * 1e-9, device.memory_gb_per_s * 1e9
    whole_row = work.row_bytes + work.state_bytes
    dense = 4.0 * dense_parameters(work)
    row_exchange = group.all_to_all("group", sent)
    summed = (copies.share("replicas", owned * work.row_bytes),) if replicas > 1 else ()
    keys = [group.all_to_all("group", asked * inflation * KEY_BYTES)]
    if replicas > 1:
        keys.append(copies.share("replicas", owned * KEY_BYTES))
    return {
        "route": StageSeconds(host.list_us * 1e-6 * shards, tuple(keys)),
        "place": StageSeconds(host.key_ns * 1e-9 * asked * inflation),
        "retrieve": StageSeconds(row_seconds * read + read * whole_row / device_link(cluster)),
        "synchronise": StageSeconds(2 * (touched - read) * whole_row / memory),
        "answer": StageSeconds(exchanges=(row_exchange,), by_load=True),
        "compute": StageSeconds(
            compute_seconds(cluster, work), per_call=device.call_us * 1e-6, by_load=True
        ),
        "collect": StageSeconds(exchanges=(row_exchange,), last=summed, by_load=True),
        "reduce": StageSeconds(exchanges=(everybody.all_reduce("everybody", dense),)),
        "update": StageSeconds((3 * touched * whole_row + 7 * dense) / memory),
        "refresh": StageSeconds(2 * (touched - read) * whole_row / memory),
        "update_rows": StageSeconds(3 * touched * whole_row / memory),
        "write": StageSeconds(row_seconds * touched + touched * whole_row / device_link(cluster)),
    }


def device_link(cluster: Cluster) -> float:
    """Return the bytes a second between host and device."""
    return cluster.device.host_gb_per_s * 1e9


def compute_seconds(cluster: Cluster, work: Workload) -> float:
    """Return forward and backward of the mean worker's batch."""
    return work.flops / (cluster.device.teraflops * 1e12 * cluster.device.efficiency)


def dense_parameters(work: Workload) -> float:
    """Return the parameters outside tables: half the FLOPs of a token, without attention."""
    one, two = (backbone_flops(work.model, [length]) for length in (1, 2))
    return (3 * one - two) / 2  # a sequence of n tokens costs n p + n (n + 1) a
