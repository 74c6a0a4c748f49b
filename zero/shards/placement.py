"""Over which ranks a model is sharded and replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from zero.comm import Comm


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
