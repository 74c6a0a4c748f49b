"""Tensors that the optimizer steps in place of this rank's shards, flat and as long as the shard.

master weights    of a wider dtype than the parameters, which are the rounded masters
copies elsewhere  in a home apart from the device (home.py), with their gradients and optimizer state: master weights,
                  or copies of shards whose dtype is wide enough

After a step they are copied into the parameters. Before a step, elements of the parameters that were written since
(loaded weights) replace those of the masters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero.shards.shard_group import ShardGroup

_CHUNK = 2**22
"""Elements that are compared or copied at a time."""


class Masters:
    """The stepped tensors of groups whose dtype is narrower than `dtype`, and of all groups whose home is elsewhere."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._groups: list[ShardGroup] = []

    def add(self, group: ShardGroup) -> None:
        """Makes the stepped tensor of a group, if that is not to be the shard itself."""
        shard = group.shard
        if self._is_wider(group):
            shard = shard.to(self._dtype)
        elif not group.home.apart or group.home.has(shard):
            return
        group.stepped = group.home.place(shard)
        self._groups.append(group)

    def _is_wider(self, group: ShardGroup) -> bool:
        return (
            self._dtype is not None
            and group.full.is_floating_point()
            and self._dtype.itemsize > group.full.element_size()
        )

    @property
    def of_more_bits(self) -> bool:
        """Whether there are master weights of a wider dtype, which belong to the optimizer state."""
        return any(self._is_wider(group) for group in self._groups)

    def differ(self) -> bool:
        """Whether any stepped tensor differs from the parameters in its dtype."""
        chunks = (pair for group in self._groups for pair in _chunks(group))
        return any(bool((own != shard.to(own)).any()) for own, shard in chunks)

    def of(self, group: ShardGroup) -> Tensor | None:
        """The master weights of a group; None if its stepped tensor is no wider than the parameters."""
        return group.stepped if group in self._groups and self._is_wider(group) else None

    def settled(self, group: ShardGroup) -> Tensor | None:
        """The master weights for the next step; see `settled`."""
        master = self.of(group)
        return None if master is None else settled(master, group.shard)

    def refresh(self) -> None:
        """Copies elements that were written into the parameters since the last `write` into the stepped tensors."""
        for group in self._groups:
            for own, shard in _chunks(group):
                now = shard.to(own.device)
                torch.where(_written(now, own), now.to(own.dtype), own, out=own)
            group.home.used(group.stepped)

    def write(self, groups: Iterable[ShardGroup]) -> None:
        """Copies the stepped tensors into this rank's shards of the parameters, rounded."""
        for group in groups:
            if group.stepped is not group.shard:
                for own, shard in _chunks(group):
                    shard.copy_(own)  # the host may write into masters from here on
                group.home.used(group.stepped)


def settled(master: Tensor, shard: Tensor) -> Tensor:
    """The master weights for the next step: elements of the shard that were written since replace the master's.

    Returns the master itself if none were written. Does not write into it: its weights may be loaded later.
    """
    shard = shard.to(master.device)
    written = _written(shard, master)
    return torch.where(written, shard.to(master.dtype), master) if written.any() else master


def _written(shard: Tensor, master: Tensor) -> Tensor:
    return shard != master.to(shard.dtype)


def _chunks(group: ShardGroup) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(group.stepped.split(_CHUNK), group.shard.split(_CHUNK), strict=True)
