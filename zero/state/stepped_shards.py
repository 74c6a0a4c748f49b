"""What steps the shards whose state is saved and loaded: an OSS, or the user's optimizer of an FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.oss import OSS
from zero.shards.shard_group import ShardGroup


@dataclass
class SteppedShards:
    """The user's optimizer of an FSDP, whose parameters are shards in the shard groups. An OSS has the same attributes,
    but for `shard_groups`.

    A parameter in no shard group is unsharded, and the same on every rank.
    """

    optim: Optimizer
    shard_groups: list[ShardGroup]
    comm: Comm
    granularity: None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def part(self, param: nn.Parameter) -> nn.Parameter:
        return param


Sharded = OSS | SteppedShards


def groups_of(optimizer: Sharded) -> list[ShardGroup]:
    """The shard groups of its parameters."""
    return optimizer.shards.shard_groups if isinstance(optimizer, OSS) else optimizer.shard_groups
