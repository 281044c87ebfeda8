"""This process among the ranks of a run: its place in the mesh, and what all ranks do together.

Ranks stand in a mesh of replicas x shards: rank = replica * shards + shard. The ranks of one
replica share every table between them; the same shard of all replicas holds the same rows. The
dense part is data-parallel over everybody: gradients of *sums* are added up, divided by a
normaliser that all ranks know before the backward pass. Touch this when ranks meet, agree or fail
in another way.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import SlipstreamError
from slipstream.tables.communicator import Communicator
from slipstream.training.device import HOST, group_backend
from slipstream.training.watch import Watch, is_connection_failure

T = TypeVar("T")
_RUNS = itertools.count()  # runs this process has joined; all ranks join the same ones


class OtherRankError(SlipstreamError):
    """An error of another rank, with which this rank ends too; the other rank reports it."""


@dataclass(frozen=True)
class Ranks:
    """One rank's view of a run; the default is a run of one."""

    rank: int = 0
    world: int = 1
    replicas: int = 1
    mesh: DeviceMesh | None = None
    everybody: Communicator | None = None

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        return self.world // self.replicas

    @property
    def shard(self) -> int:
        """This rank's place among those that share its tables."""
        return self.rank % self.shards

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks of this replica; None where one rank holds whole tables."""
        return None if self.mesh is None or self.shards == 1 else self.mesh.get_group("shard")

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same rows; None where there is one replica."""
        return None if self.mesh is None or self.replicas == 1 else self.mesh.get_group("replica")

    def another_shard_group(self, timeout_seconds: float) -> dist.ProcessGroup | None:
        """Make another process group of this replica, for overlapping messages. Collective."""
        if self.mesh is None or self.shards == 1:
            return None
        mine = None
        for row in self.mesh.mesh.tolist():
            group = dist.new_group(row, timeout=timedelta(seconds=timeout_seconds))
            mine = group if self.rank in row else mine
        return mine

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks (exact for integers below 2^53). Collective."""
        if self.everybody is None:
            return list(values)
        return self.everybody.sum_(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_gradients_(self, model: nn.Module) -> None:
        """Sum dense gradients over all ranks in one message; an unused parameter stays without."""
        if self.everybody is None:
            return
        parameters = list(model.parameters())
        like = parameters[0]
        used_P = torch.tensor(
            [p.grad is not None for p in parameters], dtype=like.dtype, device=like.device
        )
        parts = [
            torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1)
            for p in parameters
        ]
        flat = self.everybody.sum_(torch.cat([used_P, *parts]))
        pieces = flat[len(parameters) :].split([p.numel() for p in parameters])
        for parameter, piece, used in zip(
            parameters, pieces, flat[: len(parameters)].tolist(), strict=True
        ):
            parameter.grad = piece.view_as(parameter) if used else None

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """Let rank 0 work; all return its JSON-able answer, or fail with it. Collective."""
        if self.everybody is None:
            return work()
        answer, failure = None, None
        if self.first:
            try:
                answer = work()
            except SlipstreamError as error:
                failure = error
        message = [
            json.dumps({"answer": answer, "failure": None if failure is None else str(failure)})
        ]
        dist.broadcast_object_list(message, src=0, group=self.everybody.group)
        if failure is not None:
            raise failure
        received = json.loads(message[0])
        if received["failure"] is not None:
            raise OtherRankError(received["failure"])
        return received["answer"]

    def fail_together(self, failure: Exception | None) -> None:
        """Raise on all ranks when one of them has failed. Collective."""
        if self.everybody is None:
            if failure is not None:
                raise failure
            return
        mine = [None if failure is None else f"{failure}"]
        of_all: list[list[str | None]] = [[None]] * self.world
        dist.all_gather_object(of_all, mine, group=self.everybody.group)
        if failure is not None:
            raise failure
        for rank, (sentence,) in enumerate(of_all):
            if sentence is not None:
                raise OtherRankError(f"rank {rank}: {sentence}")


ALONE = Ranks()


def mesh_shape(mesh: str, world: int) -> tuple[int, int]:
    """Return (replicas, shards) of a recipe's mesh: `auto` is one replica over all ranks."""
    if mesh == "auto":
        return 1, world
    replicas, _, shards = mesh.partition("x")
    if int(replicas) * int(shards) != world:
        raise SlipstreamError(
            f"mesh {mesh} needs {int(replicas) * int(shards)} ranks, but {world} "
            f"{'was' if world == 1 else 'were'} started; "
            "change mesh, or torchrun's --nproc-per-node"
        )
    return int(replicas), int(shards)


def arrange(mesh: str, timeout: timedelta) -> Ranks:
    """Place this rank in its mesh, from the default process group. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas, shards = mesh_shape(mesh, world)
    places = torch.arange(world).view(replicas, shards)
    groups = {}
    for name, members in (("replica", places.T), ("shard", places)):
        for row in members.tolist():
            group = dist.new_group(row, timeout=timeout)
            if rank in row:
                groups[name] = group
    mesh_of_ranks = DeviceMesh.from_group(
        [groups["replica"], groups["shard"]],
        "cpu",
        mesh=places,
        mesh_dim_names=("replica", "shard"),
    )
    return Ranks(
        rank,
        world,
        replicas,
        mesh_of_ranks,
        Communicator(dist.new_group(list(range(world)), timeout=timeout)),
    )


@contextlib.contextmanager
def joined(mesh: str, timeout_seconds: float, device: torch.device = HOST) -> Iterator[Ranks]:
    """Join the ranks torchrun started, or be alone; a lost rank becomes an error that names it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and not dist.is_initialized():
        mesh_shape(mesh, 1)
        yield ALONE
        return
    timeout = timedelta(seconds=timeout_seconds)
    if dist.is_initialized():  # somebody else's group: its life is theirs to watch
        yield arrange(mesh, timeout)
        return
    mesh_shape(mesh, world)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # A restarted job, or another run of these processes, meets in the same store: it must not read
    # what the one before left there.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"slipstream/{restart}/{world}/{next(_RUNS)}", store)
    backend, meeting = group_backend(device), dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=timeout)
    watch = Watch(store, rank, world)
    try:
        yield arrange(mesh, timeout)
    except SlipstreamError as error:
        if not isinstance(error, OtherRankError):
            watch.report(error)
        raise
    except BaseException as error:
        watch.report(error)
        lost = watch.who_is_lost() if is_connection_failure(error) else None
        if lost is None:
            raise
        raise SlipstreamError(
            f"{lost}; this job ends, run the same command again to go on from the last checkpoint"
        ) from error
    finally:
        watch.close()
        dist.destroy_process_group()
