"""This process among the ranks of a run: who it is, with whom it shares tables, and the few things
all ranks decide together.

Ranks stand in a mesh of replicas x shards: rank = replica * shards + shard. The ranks of one
replica share every table between them; the same shard of all replicas holds the same rows. The
dense part is data-parallel over everybody: gradients of *sums* are added up, divided by a
normaliser that all ranks know before the backward pass.
"""

import contextlib
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
from slipstream.training.watch import Watch

T = TypeVar("T")


class ToldByFirstRank(SlipstreamError):
    """An error all ranks end with, which rank 0 has the word for."""


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
        """The ranks of this replica as a process group of its own, for messages that overlap with
        others. Collective.
        """
        if self.mesh is None or self.shards == 1:
            return None
        mine = None
        for row in self.mesh.mesh.tolist():
            group = dist.new_group(row, timeout=timedelta(seconds=timeout_seconds))
            mine = group if self.rank in row else mine
        return mine

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of everybody's numbers (exact for integers below 2^53), the same on all ranks."""
        if self.everybody is None:
            return list(values)
        return self.everybody.sum_(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_gradients_(self, model: nn.Module) -> None:
        """Dense gradients summed over everybody, in one message; a parameter nobody used stays
        without one.
        """
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

    def first_does(self, work: Callable[[], T]) -> T:
        """Rank 0 works, everybody gets its (JSON-able) answer; when it fails, everybody ends."""
        if self.everybody is None:
            return work()
        answer, failure = None, None
        if self.first:
            try:
                answer = work()
            except SlipstreamError as error:
                failure = error
        told = [
            json.dumps({"answer": answer, "failure": None if failure is None else str(failure)})
        ]
        dist.broadcast_object_list(told, src=0, group=self.everybody.group)
        if failure is not None:
            raise failure
        heard = json.loads(told[0])
        if heard["failure"] is not None:
            raise ToldByFirstRank(heard["failure"])
        return heard["answer"]

    def all_did(self, failure: Exception | None) -> None:
        """Everybody says whether its part went well; when one rank's did not, all end."""
        if self.everybody is None:
            if failure is not None:
                raise failure
            return
        said = [None if failure is None else f"{failure}"]
        heard: list[list[str | None]] = [[None]] * self.world
        dist.all_gather_object(heard, said, group=self.everybody.group)
        if failure is not None:
            raise failure
        for rank, (sentence,) in enumerate(heard):
            if sentence is not None:
                raise ToldByFirstRank(f"rank {rank}: {sentence}")


ALONE = Ranks()


def mesh_shape(mesh: str, world: int) -> tuple[int, int]:
    """(replicas, shards) of a recipe's mesh: `auto` is one replica over all ranks."""
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
    """This rank in its mesh, from the default process group. Collective."""
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
    """The ranks torchrun started, or this process alone. A rank that gets lost becomes an error
    that names it on all others.
    """
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
    # A restarted job may meet in the store of the one before: what that one left there must not be
    # read.
    store = dist.PrefixStore(
        f"slipstream/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world}", store
    )
    backend, meeting = group_backend(device), dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=timeout)
    watch = Watch(store, rank, world)
    try:
        yield arrange(mesh, timeout)
    except SlipstreamError as error:
        if not isinstance(error, ToldByFirstRank):
            watch.report(str(error))
        raise
    except RuntimeError as error:
        if (sentence := watch.who_is_lost()) is not None:
            raise SlipstreamError(
                f"{sentence}; this job ends, run the same command again to go on from the last "
                "checkpoint"
            ) from error
        watch.report(f"{type(error).__name__}: {error}")
        raise
    except BaseException as error:
        watch.report(f"{type(error).__name__}: {error}")
        raise
    finally:
        watch.close()
        dist.destroy_process_group()
