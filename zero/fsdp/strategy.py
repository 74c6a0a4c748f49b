"""How far a model is sharded, and over which ranks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zero.oss.comm import Comm


class ShardingStrategy(enum.Enum):
    """PyTorch's names; its own enum and plain strings are understood too."""

    FULL_SHARD = "parameters, gradients and optimizer state in parts; parameters released after forward"
    SHARD_GRAD_OP = "the same, but parameters stay whole from forward to backward"
    NO_SHARD = "everything whole on every rank, as with DistributedDataParallel"
    HYBRID_SHARD = "FULL_SHARD within a group, replicated across groups"
    HYBRID_SHARD_ZERO2 = "SHARD_GRAD_OP within a group, replicated across groups"

    @property
    def hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def keeps_parameters(self) -> bool:
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class Placement:
    """Over which ranks a model is cut, and across which it is repeated (None: nowhere)."""

    comm: Comm
    replicas: Comm | None = None

    def all_groups(self) -> list[Comm]:
        return [self.comm] if self.replicas is None else [self.comm, self.replicas]

    @property
    def first(self) -> bool:
        """Whether this rank is the one whose values all start from."""
        return all(comm.rank == 0 for comm in self.all_groups())

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Overwrites the tensors of all ranks by those of the first."""
        for comm in self.all_groups():
            comm.broadcast(tensors)


def as_strategy(given: Any) -> ShardingStrategy:
    """Raises ValueError for what is no strategy."""
    name = given if isinstance(given, str) else getattr(given, "name", given)
    if name not in ShardingStrategy.__members__:
        known = ", ".join(ShardingStrategy.__members__)
        raise ValueError(f"sharding_strategy={given!r} is unknown. Choose one of {known}.")
    return ShardingStrategy[name]


def place(strategy: ShardingStrategy, process_group: Any, device_mesh: Any) -> Placement:
    """The groups for a strategy.

    process_group: one group, or for hybrid strategies a pair: to shard within, to replicate across.
    device_mesh: the same as a DeviceMesh: of one dimension, or of two for hybrid strategies, replicas first.
    Raises ValueError where they do not fit the strategy.
    """
    if device_mesh is not None:
        groups = tuple(device_mesh.get_group(dim) for dim in range(device_mesh.ndim))[::-1]
        process_group = groups if len(groups) > 1 else groups[0]
    pair = process_group if isinstance(process_group, tuple) else None
    if strategy.hybrid:
        if pair is None or len(pair) != 2:
            raise ValueError(
                f"{strategy.name} needs two groups: process_group=(to shard within, to replicate across), or a "
                "DeviceMesh of two dimensions, (replicas, shards)."
            )
        return Placement(Comm(pair[0]), Comm(pair[1]))
    if pair is not None:
        raise ValueError(f"{strategy.name} takes one process group, but was given {len(pair)}. HYBRID_SHARD takes two.")
    if strategy is ShardingStrategy.NO_SHARD:
        return Placement(Comm.alone(), Comm(process_group))
    return Placement(Comm(process_group))
