"""Tensors that the optimizer steps in place of this rank's shards, flat and as long as the shard.

master weights    of a wider dtype than the parameters, which are the rounded masters
offloaded copies  in the memory of the CPU or in files (offload.py), with their gradients and optimizer state: master
                  weights, or copies of shards whose dtype is wide enough

After a step they are copied into the parameters. Before a step, elements of the parameters that were written since
(loaded weights) replace those of the masters. Only groups that have such a tensor (`ShardGroup.main`) are given to
functions here, except to `make_main`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero._torch.tensors import has_values
from zero.shards.shard_group import ShardGroup

# Elements that are compared at a time.
_CHUNK = 2**22


def make_main(group: ShardGroup, dtype: torch.dtype | None, rounded_to: torch.dtype | None = None) -> None:
    """Makes the tensor that is stepped for a group whose dtype is narrower than `dtype`, or which is offloaded.

    rounded_to: the dtype in which parameters are stored from now on; the masters keep what they were."""
    shard, offload = group.shard, group.offload
    if rounded_to is not None and rounded_to.itemsize < shard.element_size():
        # The group gets another buffer next: a view would keep all of the old one alive.
        shard = shard.clone()
        group.round_to(rounded_to)
    elif dtype is not None and shard.is_floating_point() and dtype.itemsize > shard.element_size():
        shard = shard.to(dtype)
    elif not offload.active or offload.has(shard):
        return
    group.main = offload.place(shard)


def differs(group: ShardGroup) -> bool:
    """Returns whether the stepped tensor differs from the parameters in its dtype."""
    return any(bool((own != shard.to(own)).any()) for own, shard in _chunks(group))


def refresh(group: ShardGroup) -> None:
    """Copies elements that were written into the parameters since the last `write` into the stepped tensor."""
    if group.offload.holds(group.shard):
        return
    for own, shard in _chunks(group):
        now = shard.to(own.device)
        torch.where(_written(now, own), now, own, out=own)  # widened as it is read: 22 bytes an element, not 30
    group.offload.used(group.main)


def write(group: ShardGroup) -> None:
    """Copies the stepped tensor into this rank's shard of the parameters, rounded. From another device the copies may
    be on their way until `ShardGroup.synchronize`."""
    write_part(group, slice(None))
    written(group)


def write_part(group: ShardGroup, part: slice) -> None:
    """Copies a part of it; call `written` after the last."""
    group.streams.send(group.main[part], group.own_of_full[part])


def written(group: ShardGroup) -> None:
    group.offload.returned(group.shard)
    group.offload.used(group.main)


def settled(master: Tensor, shard: Tensor) -> Tensor:
    """Returns the master weights for the next step: elements of the shard that were written since replace the master's.
    Returns the master itself if none were written."""
    # Not written into the master: its weights may be loaded later.
    shard = shard.to(master.device)
    written = _written(shard, master)
    return torch.where(written, shard.to(master.dtype), master) if written.any() else master


def _written(shard: Tensor, master: Tensor) -> Tensor:
    return shard != master.to(shard.dtype)


def _chunks(group: ShardGroup) -> Iterable[tuple[Tensor, Tensor]]:
    """Yields the stepped tensor and the shard, some elements at a time. Without values the first stand for all."""
    if not has_values(group.main):
        return [(group.main[:_CHUNK], group.shard[:_CHUNK])]
    return zip(group.main.split(_CHUNK), group.shard.split(_CHUNK), strict=True)
