"""The states of a shard group, and the options by which it stores its parameters."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from zero.shards.offload import DEVICE, Offload


class GroupState(enum.Enum):
    """The state of a group's parameters.

    SUMMONED: they are full in a separate buffer, within summon_full_params; perhaps on another rank only.
    LOST: an all-gather failed, and `full` does not hold all of them.
    """

    SHARDED = "sharded"
    GATHERING = "being gathered"
    UNSHARDED = "unsharded"
    SUMMONED = "summoned"
    LOST = "lost"

    __hash__ = object.__hash__  # enum's own is Python, and takes as long as all else of `_become`


NEXT_WITH_OWN_SHARD = {
    GroupState.GATHERING: {GroupState.UNSHARDED, GroupState.SHARDED, GroupState.LOST},
    GroupState.SHARDED: {GroupState.GATHERING, GroupState.SUMMONED},
    GroupState.UNSHARDED: {GroupState.SHARDED},
    GroupState.SUMMONED: {GroupState.SHARDED},
    GroupState.LOST: set(),
}
NEXT_IN_PLACE = {
    GroupState.GATHERING: {GroupState.UNSHARDED, GroupState.LOST},
    GroupState.UNSHARDED: {GroupState.GATHERING},
    GroupState.LOST: {GroupState.GATHERING},  # which raises the cause of the failure
}
"""The states that may follow a state: in groups with a shard of their own, and in groups that gather in place."""


@dataclass(frozen=True)
class GroupOptions:
    """How a group stores its parameters.

    own_shard: the shard is a tensor of its own, so that `full` can be freed (stage 3). Such a group begins SHARDED;
        other groups are UNSHARDED except while they gather. The other options are for groups with a shard of their own.
    compute_dtype: the dtype of `full`, if it is not the parameters'.
    shard_in_full: `shard` is freed while the group is UNSHARDED, and copied from `full` at the reshard: less memory if
        groups stay unsharded for long. Ignored if the dtypes differ, and with offload.
    offload: where the tensors lie that are stepped; at stage 3 the shard itself.
    from_first: shards have the values of the first rank of all, and the parameters of the others are not read.
    """

    own_shard: bool = False
    compute_dtype: torch.dtype | None = None
    shard_in_full: bool = False
    offload: Offload = DEVICE
    from_first: bool = False


IN_PLACE = GroupOptions()
"""For groups that are never freed."""
