"""Over which ranks a model is sharded, and across which it is replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from zero.comm import Comm
from zero.shards.exchange import Exchange, Replicated
from zero.shards.layout import Layout


class Placement:
    """comm: the ranks that each own a shard. replicas: the ranks that own the same shard (None: nobody else).

    A subclass may own shards over other ranks than it gathers parameters among.
    """

    def __init__(self, comm: Comm, replicas: Comm | None = None) -> None:
        self.comm, self.replicas = comm, replicas

    def exchange(self, layout: Layout, label: str) -> Exchange:
        """Returns how the shards of a group travel. label: the name of the group in error messages."""
        if self.replicas is not None:
            return Replicated(self.comm, self.replicas, layout, label)
        return Exchange(self.comm, layout, label)

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
        return self.replicas is None or rank // self.comm.world == self.replicas.rank

    @property
    def first(self) -> bool:
        """Whether this rank is the one whose values all start from."""
        return all(comm.rank == 0 for comm in self.all_groups())

    def compare(self, what: str, lines: Sequence[str], problem: str | None) -> None:
        """Collective. Comm.compare over all ranks: where it raises on one, it does on all."""
        for comm in self.all_groups():
            try:
                comm.compare(what, lines, problem)
            except ValueError as error:
                problem = str(error)
        if problem is not None:
            raise ValueError(problem)

    @contextmanager
    def raised_everywhere(self, what: str) -> Iterator[None]:
        """Collective where it fails: a ValueError in here is raised on every rank."""
        try:
            yield
        except ValueError as error:
            self.compare(what, [], str(error))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Overwrites the tensors of all ranks by those of the first."""
        for comm in self.all_groups():
            comm.broadcast(tensors)


optimizer_shardings: dict[str, Callable[[Placement, str], Placement]] = {"group": lambda placement, strategy: placement}
"""By the option of FSDP: returns another placement for that of a strategy, which is given by its name, too. Collective
over all ranks of the job. May raise ValueError."""
