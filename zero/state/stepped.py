"""What steps the shards whose state is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.shards.shard_group import ShardGroup


@dataclass
class SteppedShards:
    """An optimizer of shards: that inside of an OSS, or the user's of an FSDP, whose parameters are the shards.

    A parameter in no shard group is unsharded, and the same on every rank.

    param_groups: those that the user sees. part: returns the shard of one of their parameters.
    keeps_masters: whether shards are master weights. loaded: called after a state was loaded.
    """

    optim: Optimizer
    shard_groups: list[ShardGroup]
    comm: Comm
    param_groups: list[dict[str, Any]]
    part: Callable[[nn.Parameter], nn.Parameter] = lambda param: param
    keeps_masters: bool = False
    loaded: Callable[[], object] = lambda: None

    @property
    def kind(self) -> str:
        return type(self.optim).__name__

    @property
    def steps_parameters(self) -> bool:
        """Whether the optimizer holds the user's parameters themselves, as at stages 0 and 3."""
        return self.param_groups is self.optim.param_groups


def of_user(optimizer: Optimizer, shard_groups: list[ShardGroup], comm: Comm) -> SteppedShards:
    """Returns the user's optimizer of an FSDP with these shard groups."""
    return SteppedShards(optimizer, shard_groups, comm, optimizer.param_groups)
