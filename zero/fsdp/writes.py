"""Writes into unsharded parameters, such as averages and clamps: each element keeps its owner's value."""

from __future__ import annotations

import torch

from zero._torch.autograd import writes_so_far
from zero.shards.shard_group import ShardGroup

# Elements that are compared at a time, so that temporaries are small; on GPUs so that launches are few.
_CHUNK, _ON_GPU = 2**18, 2**24


class Writes:
    """Copies writes into the unsharded parameters of one shard group into the shard. torch counts them, but not those
    through `param.data`, which is noted where it is read (FullParameter)."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        # torch's count of writes at the last all-gather.
        self.when_gathered = 0

    def take_over(self) -> None:
        """Called before the full parameters are freed. After writes it copies elements that differ into the shard;
        where `full` has a lower precision, the others keep theirs."""
        group = self._group
        # With shard_in_full the shard has no memory now; the reshard copies all of it from `full`.
        if group.shard_in_full or not (group.data_was_read or writes_so_far(group.params) != self.when_gathered):
            return
        with torch.no_grad():
            chunk = _CHUNK if group.full.device.type == "cpu" else _ON_GPU
            for now, own in zip(group.own_of_full.split(chunk), group.shard.split(chunk), strict=True):
                same = (now == own.to(now)).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))
