"""Over which ranks a model is sharded, and across which it is replicated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zero.comm import Comm


@dataclass(frozen=True)
class Levels:
    """within: the ranks of this node, among which parameters are gathered. across: those of all nodes that have this
    rank's place. The ranks of both, in the order of `Comm.grid`, own the shards of a layout."""

    within: Comm
    across: Comm


@dataclass(frozen=True)
class Placement:
    """comm: the ranks that each own a shard. replicas: the ranks that own the same shard (None: nobody else).

    levels: parameters are gathered within nodes, where what is stepped is sharded over all ranks.
    """

    comm: Comm
    replicas: Comm | None = None
    levels: Levels | None = None

    def all_groups(self) -> list[Comm]:
        """Through which a rank reaches all others, one after another."""
        if self.levels is not None:
            return [self.levels.within, self.levels.across]
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
        if self.levels is None:
            return rank % self.comm.world
        node, place = divmod(rank, self.levels.within.world)
        return place * self.levels.across.world + node

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
