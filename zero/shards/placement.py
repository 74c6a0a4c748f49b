"""Over which ranks a model is sharded and replicated, and how the shards of its groups travel: among the ranks that own
them, and gradients also among the ranks that own the same ones; on which stream, and in which dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from zero.comm import Comm, Work
from zero.comm.streams import HOST, HostStreams, on_other_device
from zero.comm.transport import Message
from zero.shards.layout import Layout

_HERE = nullcontext()  # the CPU has no streams


class Exchange:
    """Gathers and reduces among the ranks that own the shards.

    label: the name of the group in error messages.
    `gathered_by`: the ranks among which the full buffer is gathered and gradients are reduced first.
    """

    def __init__(self, placement: Placement, layout: Layout, label: str) -> None:
        self.gathered_by, self._replicas, self._layout = placement.comm, placement.replicas, layout
        self._own = layout.segment(placement.comm.rank)
        self.rename(label)

    def rename(self, label: str) -> None:
        """Sets the name of the group in error messages; on every rank at the same point."""
        self._gather = self.gathered_by.channel(f"the gathering of {label}")
        self._reduction = self.gathered_by.channel(f"the reduction of {label}")
        if self._replicas is not None:
            self._averaging = self._replicas.channel(f"the averaging over replicas of {label}")

    def gather_full(self, shard: Tensor, device: torch.device, channel: int, to: int | None = None) -> Tensor | None:
        """Collective. Gathers a full flat tensor of which each rank passes its shard, outside of the steps that train.

        shard: as long as this rank's segment. to: the rank of the group that gets it, by default all; None elsewhere.
        """
        comm, layout = self.gathered_by, self._layout
        owners = range(comm.world)
        if to is not None and to != comm.rank:
            sent = shard.to(device)
            comm.collect([(owner, sent if owner == comm.rank else None) for owner in owners], to, device)
            return None
        full = shard.new_empty(layout.numel, device=device)
        with torch.no_grad():
            full[self._own] = shard
        if to is None:
            comm.gather(full, layout.bounds, channel).wait()
        else:
            comm.collect([(owner, full[layout.segment(owner)]) for owner in owners], to, device)
        return full

    def comms(self) -> list[Comm]:
        """The groups of ranks over which gradients are reduced, one after another."""
        return [self.gathered_by] if self._replicas is None else [self.gathered_by, self._replicas]

    def gather(
        self,
        full: Tensor,
        shard: Tensor | None,
        streams: HostStreams,
        *,
        channel: int | None = None,
        ahead: bool = False,
    ) -> Work:
        """Collective. Launches the all-gather that fills the full buffer, which gets memory first if it has none.

        shard: this rank's shard; None if it lies in the buffer already. channel: of `gathered_by`, by default "the
        gathering of" the group.
        ahead: see HostStreams.gathers.
        """
        with (
            _HERE
            if streams is HOST
            else streams.gathers(ahead=ahead, from_host=shard is not None and on_other_device(shard, full))
        ):
            if shard is not None:
                full.untyped_storage().resize_(full.nbytes)
                own = full[self._own]
                sent = shard if shard.dtype == own.dtype else shard.to(own.device, non_blocking=True)  # rounded there
                own.copy_(sent, non_blocking=True)
            channel = self._gather if channel is None else channel
            work = self.gathered_by.gather(full, self._layout.bounds, channel)
            return work if streams is HOST else streams.arriving(work, self.gathered_by, (full, self))

    def average(self, full: Tensor, streams: HostStreams) -> Work:
        """Collective, without replicas. Launches the all-reduce of a full buffer of gradients, each a share of it."""
        comm = self.gathered_by
        with _HERE if streams is HOST else streams.reductions():
            work = comm.launch_all_reduce(full, channel=self._reduction)
            return work if streams is HOST else streams.arriving(work, comm, full)

    def reduce(self, messages: Sequence[Message], streams: HostStreams) -> Work:
        """Collective. Launches a reduction. `wait` returns the averages for this rank's shard, flat, one message after
        another."""
        comm, replicas = self.gathered_by, self._replicas
        if streams is HOST:
            work = comm.reduce(messages, times=1 / comm.world, channel=self._reduction)
            return work if replicas is None else ReplicaWork(work, replicas, self._averaging)
        with streams.reductions():
            work = comm.reduce(messages, times=1 / comm.world, channel=self._reduction)
            if replicas is None:
                return streams.arriving(work, comm, messages)
            sums = Work(work.wait())  # here, where sums that it still makes read what this stream has allocated
            reduction = streams.arriving(sums, comm, messages)
            with streams.averages():
                average = streams.arriving(ReplicaWork(sums, replicas, self._averaging), comm, None)
            average.before = reduction
            return average


class ReplicaWork(Work):
    """Averages what a reduction brings over replicas."""

    def __init__(self, reduction: Work, replicas: Comm, channel: int) -> None:
        self._reduction, self._replicas, self._channel = reduction, replicas, channel

    def wait(self) -> Tensor:
        averages: Tensor = self._reduction.wait()
        self._replicas.all_reduce(averages, times=1 / self._replicas.world, channel=self._channel)
        return averages


class Placement:
    """comm: the ranks that each own a shard. replicas: the ranks that own the same shard; None: nobody else."""

    def __init__(self, comm: Comm, replicas: Comm | None = None) -> None:
        self.comm, self.replicas = comm, replicas
        if replicas is not None:
            comm.log.failure.couple(replicas.log.failure)

    def all_groups(self) -> list[Comm]:
        """Through which a rank reaches all others, one after another."""
        return [self.comm] if self.replicas is None else [self.comm, self.replicas]

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        return [comm.group for comm in self.all_groups()]

    @property
    def ranks(self) -> int:
        return math.prod(comm.world for comm in self.all_groups())

    def owner(self, rank: int) -> int:
        """Which rank of `comm` is rank `rank` of all that the model is spread over, counted node by node; of replicas
        the one in the same node."""
        return rank % self.comm.world

    def has(self, rank: int) -> bool:
        """Whether rank `rank` of all is in `comm`."""
        return rank // self.comm.world == (0 if self.replicas is None else self.replicas.rank)

    @property
    def first(self) -> bool:
        """Whether this rank is the one whose values all start from."""
        return all(comm.rank == 0 for comm in self.all_groups())

    def scatter(self, read: Callable[[int, Tensor], None], bounds: Sequence[int], own: Tensor) -> None:
        """Collective. Overwrites `own` by this rank's segment of what the first rank of all reads. See Comm.scatter."""
        if self.replicas is None or self.replicas.rank == 0:
            self.comm.scatter(read, bounds, own)
        if self.replicas is not None:
            self.replicas.broadcast([own])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Overwrites the tensors of all ranks by those of the first."""
        for comm in self.all_groups():
            comm.broadcast(tensors)
