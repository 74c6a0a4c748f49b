"""Writes into unsharded parameters, such as averages and clamps: each element keeps its owner's value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero._torch import has_values, outside_function_modes, writes_so_far
from zero.fsdp.refusal import Refusal, moved_problem
from zero.shards.shard_group import ShardGroup

_CHUNK = 2**18
"""Elements that are compared at a time, so that temporaries are small."""


class GroupWrites:
    """Detects writes into the unsharded parameters of one shard group, and copies them into the shard.

    looks: whether the next `any` looks for writes that torch does not count: through `param.data`. If it finds some,
        every later `any` expects such writes. Looking reads the entire shard, so it is done once.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.looks = self._uncounted = False
        self._group = group
        self.when_gathered = 0
        """torch's count of writes at the last all-gather."""

    def any(self) -> bool:
        """Whether there were writes since the all-gather."""
        if self.looks:
            self.looks = False
            self._uncounted = has_values(self._group.full) and any(
                not torch.equal(now, gathered) for now, _, gathered in self._chunks()
            )
        return self._uncounted or writes_so_far(self._group.params) != self.when_gathered

    def take_over(self) -> None:
        """Copies elements that differ into the shard; where `full` has a lower precision, the others keep theirs."""
        with torch.no_grad():
            for now, own, gathered in self._chunks():
                same = (now == gathered).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields chunks of this rank's segment of `full` and of the shard, and of the shard as it was gathered."""
        group = self._group
        for now, own in zip(group.own_of_full.split(_CHUNK), group.shard.split(_CHUNK), strict=True):
            yield now, own, own.to(now)


class Writes:
    """Detects writes into the unsharded parameters of one unit. refusal: of data that parameters were given."""

    def __init__(self, groups: Sequence[ShardGroup], refusal: Refusal) -> None:
        self._of = {group: GroupWrites(group) for group in groups if group.frees}
        self._refusal = refusal

    def look(self) -> None:
        """Has the next reshard look for writes that torch does not count."""
        for writes in self._of.values():
            writes.looks = True

    def refuse_other_data(self) -> None:
        """Raises RuntimeError on every rank if a parameter was given other data, which all would lose."""
        for group in self._of:
            self._refuse_moved(group)

    def _refuse_moved(self, group: ShardGroup) -> None:
        with outside_function_modes():  # which the search for reads is: an address is none
            moved = group.moved()
        problem = None if moved is None else moved_problem([group])
        if problem is not None:
            group.rebind()  # what ends this forward reshards it
            self._refusal.raise_everywhere(problem)

    def gathered(self, group: ShardGroup) -> None:
        """An all-gather of the group has ended, and its parameters are full."""
        if group in self._of:
            self._of[group].when_gathered = writes_so_far(group.params)

    def take_over(self, group: ShardGroup) -> None:
        """The full parameters of the group are about to be freed. Raises RuntimeError on every rank if one was given
        other data."""
        if group not in self._of:
            return
        self._refuse_moved(group)
        if not group.shard_in_full and self._of[group].any():
            self._of[group].take_over()
