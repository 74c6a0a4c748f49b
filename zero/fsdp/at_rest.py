"""Refuses results that were computed from parameters at rest, such as a penalty in the loss.

At rest a parameter is this rank's shard, and the gradient of a result computed from it is that of the shard, which
nobody averages. Such a result has nodes of its own by which autograd accumulates gradients (AccumulateGrad) where full
parameters have another dtype or lie on another device than shards: torch drops a parameter's node when data of another
dtype or device is set. Backward looks for these nodes when it reaches the first unit. Elsewhere full parameters and
shards have one node, and autograd itself refuses a gradient of the shard's shape.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero._torch import has_values, leaves_of_graphs, writes_into
from zero.fsdp.refusal import Refusal
from zero.shards.group_state import GroupState
from zero.shards.shard_group import ShardGroup


class ReadsAtRest:
    """Looks for reads at rest when a backward begins. `groups`: where there may be some."""

    def __init__(self, groups: Iterable[ShardGroup], refusal: Refusal) -> None:
        self._refusal = refusal
        self.groups = [
            group
            for group in groups
            if group.comm.world > 1
            and has_values(group.full)
            and (group.full.dtype, group.full.device) != (group.shard.dtype, group.shard.device)
        ]

    def refuse(self) -> None:
        """Collective where it raises RuntimeError, which it does on every rank."""
        for group in self.groups:
            named = zip(group.params, group.names, strict=True)
            trained = [(param, name) for param, name in named if param.requires_grad]
            if not trained or group.state is not GroupState.SHARDED:
                continue
            nodes = leaves_of_graphs([param for param, _ in trained])
            for node, (_, name) in zip(nodes, trained, strict=True):
                if writes_into(node):
                    self._refusal.raise_everywhere(
                        f"the loss was computed from {name} outside of forward, where it is this rank's shard, as by a "
                        "penalty. Compute it inside forward, and return it with the output; or under "
                        "model.summon_full_params()."
                    )
