"""Writes into unsharded parameters, such as averages and clamps: each element keeps its owner's value."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zero._torch import has_values, outside_function_modes, writes_so_far
from zero.fsdp.events import ModelEvents, model_events
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit
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


class Writes(ModelEvents):
    """Looks for writes in each forward."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._of = {group: GroupWrites(group) for group in model.index.groups if group.frees}
        self._modes: set[bool] = set()
        """The modes (`module.training`) in which a forward has begun."""

    def entering(self, unit: Unit) -> None:
        if unit is self.model.root and unit.module.training not in self._modes:
            self._modes.add(unit.module.training)
            for writes in self._of.values():
                writes.looks = True

    def unsharding(self, unit: Unit) -> None:
        """Raises RuntimeError on every rank if a parameter was given other data, which all would lose."""
        for group in unit.groups:
            if group in self._of:
                self._refuse_moved(group)

    def _refuse_moved(self, group: ShardGroup) -> None:
        with outside_function_modes():  # which the search for reads is: an address is none
            moved = group.moved()
        problem = None if moved is None else self.model.moved_problem([group])
        if problem is not None:
            group.rebind()  # what ends this forward reshards it
            self.model.refuse(problem)

    def unsharded(self, group: ShardGroup) -> None:
        if group in self._of:
            self._of[group].when_gathered = writes_so_far(group.params)

    def resharding(self, group: ShardGroup) -> None:
        """Raises RuntimeError on every rank if a parameter was given other data, which all would lose."""
        if group not in self._of:
            return
        self._refuse_moved(group)
        if not group.shard_in_full and self._of[group].any():
            self._of[group].take_over()


model_events.append(Writes)
