"""Hybrid sharding: parameters are sharded within a group of ranks, and replicated across groups. NO_SHARD is the same
with shard groups of one rank.

FSDP(sharding_strategy="HYBRID_SHARD") and HYBRID_SHARD_ZERO2 replicate shards, gradients and optimizer state, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero.comm import Comm, Handle
from zero.comm.transport import Message
from zero.shards.layout import Layout
from zero.shards.placement import Exchange, Placement


class HybridPlacement(Placement):
    """comm: the ranks that each own a shard. replicas: the ranks that own the same shard."""

    def __init__(self, comm: Comm, replicas: Comm) -> None:
        super().__init__(comm)
        self.replicas: Comm = replicas

    def exchange(self, layout: Layout, label: str) -> Exchange:
        return Replicated(self.comm, self.replicas, layout, label)

    def all_groups(self) -> list[Comm]:
        return [self.comm, self.replicas]

    def owner(self, rank: int) -> int:
        return rank % self.comm.world

    def has(self, rank: int) -> bool:
        return rank // self.comm.world == self.replicas.rank


class Replicated(Exchange):
    """Averages over replicas, too: the ranks that own the same shard."""

    def __init__(self, comm: Comm, replicas: Comm, layout: Layout, label: str) -> None:
        self._replicas = replicas
        super().__init__(comm, layout, label)

    def rename(self, label: str) -> None:
        super().rename(label)
        self._averaging = self._replicas.channel(f"the averaging over replicas of {label}")

    def comms(self) -> list[Comm]:
        return [self.gathered_by, self._replicas]

    def _reduce_here(self, messages: Sequence[Message]) -> Handle:
        within = super()._reduce_here(messages)

        def average() -> Tensor:
            averages: Tensor = within.wait()
            self._replicas.all_reduce(averages, channel=self._averaging)
            return averages.mul_(1 / self._replicas.world)

        return Handle(average)


def placement_of(strategy: str, groups: Sequence[Any]) -> Placement:
    """Returns over which ranks a strategy shards. groups: one, or for hybrid strategies the shard group and the
    replicate group. Raises ValueError for groups that do not suit it."""
    if strategy.startswith("HYBRID"):
        return _hybrid(strategy, groups)
    if len(groups) != 1:
        raise ValueError(f"{strategy} takes one process group, but was given {len(groups)}. HYBRID_SHARD takes two.")
    comm = Comm(groups[0])
    return HybridPlacement(Comm.alone(), comm) if strategy == "NO_SHARD" else Placement(comm)


def _hybrid(strategy: str, groups: Sequence[Any]) -> Placement:
    if len(groups) != 2:
        raise ValueError(
            f"{strategy} needs two groups: process_group=(to shard within, to replicate across), or a "
            "DeviceMesh of two dimensions, (replicas, shards)."
        )
    if not any(isinstance(group, Comm) for group in groups):  # else a plan's ranks, which do not exist
        shards, replicas = ([*dist.get_process_group_ranks(group)] for group in groups)
        if set(shards) & set(replicas) != {dist.get_rank()}:
            raise ValueError(
                f"{strategy} was given, as process_group, the ranks {shards} to shard within and {replicas} to "
                "replicate across. They must have this rank in common and no other, as rows and columns of a "
                "DeviceMesh."
            )
    return HybridPlacement(Comm(groups[0]), Comm(groups[1]))
