"""Sharded models that DistributedDataParallel must not wrap."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from zero.fsdp.model import sharded_params
from zero.interop.ddp import refuse_within_ddp
from zero.sdp import ShardedDDP


def _within_sharded_ddp(module: nn.Module, left_out: Collection[str]) -> str | None:
    """Returns an error if DistributedDataParallel would wrap a parameter of a ShardedDDP. left_out: ignored names."""
    held = {param for child in module.modules() if isinstance(child, ShardedDDP) for param in child.parameters()}
    for name, param in module.named_parameters() if held else ():
        if param in held and param.requires_grad and name not in left_out:
            return (
                f"DistributedDataParallel wraps {name!r}, whose gradient ShardedDDP reduces to its owner. Remove "
                "DistributedDataParallel: ShardedDDP averages gradients itself."
            )
    return None


def _within_fsdp(module: nn.Module, left_out: Collection[str]) -> str | None:
    sharded = sharded_params()
    for name, param in module.named_parameters() if sharded else ():
        if param in sharded and name not in left_out:
            return (
                f"DistributedDataParallel wraps {name!r}, of which FSDP keeps another shard on each rank. Remove "
                "DistributedDataParallel: FSDP averages gradients itself."
            )
    return None


refuse_within_ddp(_within_sharded_ddp)
refuse_within_ddp(_within_fsdp)
