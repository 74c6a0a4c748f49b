"""Sharding strategies, and the groups of ranks that they shard and replicate over."""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed as dist

from zero.comm import Comm
from zero.shards.placement import Placement, optimizer_shardings


class ShardingStrategy(enum.Enum):
    """What is sharded, and for how long. Has PyTorch's names; PyTorch's own enum and strings are accepted, too."""

    FULL_SHARD = "parameters, gradients and optimizer state in shards; parameters released after forward"
    SHARD_GRAD_OP = "FULL_SHARD, but parameters stay unsharded from forward to backward"
    NO_SHARD = "everything unsharded on every rank, as with DistributedDataParallel"
    HYBRID_SHARD = "FULL_SHARD within a group, replicated across groups"
    HYBRID_SHARD_ZERO2 = "SHARD_GRAD_OP within a group, replicated across groups"

    @property
    def hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def keeps_parameters(self) -> bool:
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)


def as_strategy(given: Any) -> ShardingStrategy:
    """Converts PyTorch's enum, or a name, to a ShardingStrategy. Raises ValueError for others."""
    name = given if isinstance(given, str) else getattr(given, "name", given)
    if isinstance(name, str):
        name = name.removeprefix("_")  # PyTorch's _HYBRID_SHARD_ZERO2
    if not isinstance(name, str) or name not in ShardingStrategy.__members__:
        known = ", ".join(ShardingStrategy.__members__)
        raise ValueError(f"sharding_strategy={given!r} is unknown. Choose one of {known}.")
    return ShardingStrategy[name]


def place(
    strategy: Any, process_group: Any, device_mesh: Any, optimizer_sharding: Any = "group"
) -> tuple[ShardingStrategy, Placement, str | None]:
    """Returns the strategy, its groups, and None; or, for unusable arguments, a default for both and an error message.

    The default groups let ranks exchange the message.

    process_group: one group, or for hybrid strategies a pair: the shard group and the replicate group.
    device_mesh: the groups as a DeviceMesh of one dimension, or of two for hybrid strategies: (replicas, shards).
    optimizer_sharding: a key of `optimizer_shardings`; "group" shards the optimizer as the parameters.
    """
    groups = [process_group]
    if device_mesh is not None:
        groups = [device_mesh.get_group(dim) for dim in range(device_mesh.ndim)][::-1]
    elif isinstance(process_group, (tuple, list)):
        groups = list(process_group)
    try:
        if device_mesh is not None and process_group is not None:
            raise ValueError("process_group and device_mesh both say which ranks to shard over. Pass one of them.")
        known = as_strategy(strategy)
        return known, _shared_out(_placed(known, groups), known, optimizer_sharding), None
    except ValueError as error:
        return ShardingStrategy.FULL_SHARD, Placement(Comm(groups[0] if groups else None)), str(error)


def _shared_out(placement: Placement, strategy: ShardingStrategy, optimizer_sharding: Any) -> Placement:
    if optimizer_sharding not in optimizer_shardings:
        known = " or ".join(map(repr, optimizer_shardings))
        raise ValueError(f"optimizer_sharding={optimizer_sharding!r} is unknown. Choose {known}.")
    return optimizer_shardings[optimizer_sharding](placement, strategy.name)


def _placed(strategy: ShardingStrategy, groups: list[Any]) -> Placement:
    if not strategy.hybrid:
        if len(groups) != 1:
            raise ValueError(
                f"{strategy.name} takes one process group, but was given {len(groups)}. HYBRID_SHARD takes two."
            )
        if strategy is ShardingStrategy.NO_SHARD:
            return Placement(Comm.alone(), Comm(groups[0]))
        return Placement(Comm(groups[0]))
    if len(groups) != 2:
        raise ValueError(
            f"{strategy.name} needs two groups: process_group=(to shard within, to replicate across), or a "
            "DeviceMesh of two dimensions, (replicas, shards)."
        )
    if any(isinstance(group, Comm) for group in groups):  # a plan's ranks, which do not exist
        return Placement(Comm(groups[0]), Comm(groups[1]))
    shards, replicas = ([*dist.get_process_group_ranks(group)] for group in groups)
    if set(shards) & set(replicas) != {dist.get_rank()}:
        raise ValueError(
            f"{strategy.name} was given, as process_group, the ranks {shards} to shard within and {replicas} to "
            "replicate across. They must have this rank in common and no other, as rows and columns of a DeviceMesh."
        )
    return Placement(Comm(groups[0]), Comm(groups[1]))
