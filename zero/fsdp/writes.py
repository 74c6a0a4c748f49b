"""Writes into unsharded parameters, such as averages and clamps: each element keeps its owner's value."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zero._torch import has_values, writes_so_far
from zero.shards.shard_group import ShardGroup

# Elements that are compared at a time, so that temporaries are small.
_CHUNK = 2**18


class Writes:
    """Detects writes into the unsharded parameters of one shard group, and copies them into the shard.

    `looks`: whether the next `take_over` looks for writes that torch does not count: through `param.data`. If it finds
        some, every later one expects such writes. Looking reads the entire shard, so it is done once.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.looks = self._uncounted = False
        self._group = group
        # torch's count of writes at the last all-gather.
        self.when_gathered = 0

    def _any(self) -> bool:
        """Whether there were writes since the all-gather."""
        if self.looks:
            self.looks = False
            self._uncounted = has_values(self._group.full) and any(
                not torch.equal(now, gathered) for now, _, gathered in self._chunks()
            )
        return self._uncounted or writes_so_far(self._group.params) != self.when_gathered

    def take_over(self) -> None:
        """Called before the full parameters are freed. After writes it copies elements that differ into the shard;
        where `full` has a lower precision, the others keep theirs."""
        if self._group.shard_in_full or not self._any():
            return
        with torch.no_grad():
            for now, own, gathered in self._chunks():
                same = (now == gathered).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields chunks of this rank's segment of `full` and of the shard, and of the shard as it was gathered."""
        group = self._group
        for now, own in zip(group.own_of_full.split(_CHUNK), group.shard.split(_CHUNK), strict=True):
            yield now, own, own.to(now)
