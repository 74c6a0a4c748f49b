"""Full tensors of a shard group, outside of the steps that train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zero.shards.shard_group import ShardGroup


def gather_of(group: ShardGroup, shard: Tensor, to: int | None = None) -> Tensor | None:
    """Collective. Gathers the full flat tensor of which each rank passes its shard.

    shard: as long as this rank's segment. to: the rank of the group that gets it, by default all; None elsewhere.
    """
    owners, rank = range(group.comm.world), group.comm.rank
    if to is not None and to != rank:
        sent = shard.to(group.full.device)
        group.comm.collect([(owner, sent if owner == rank else None) for owner in owners], to)
        return None
    full = group.full.new_empty(group.layout.numel, dtype=shard.dtype)
    with torch.no_grad():
        full[group.layout.segment(rank)] = shard
    if to is None:
        group.comm.gather(full, group.layout.bounds, group.full_channel).wait()
    else:
        group.comm.collect([(owner, full[group.layout.segment(owner)]) for owner in owners], to)
    return full
