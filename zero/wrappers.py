"""What is inside of wrappers: the module of a wrapped or compiled model and the groups of its ranks, the optimizer in
that of another library."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch import uncompiled
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of

Wrapped = DistributedDataParallel | ShardedDDP | FSDP


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[Wrapped]]:
    """The user's own module, and what wraps it, from the outside in. torch.compile is not among the wrappers."""
    wrappers: list[Wrapped] = []
    while True:
        if isinstance(model, Wrapped):
            wrappers.append(model)
            model = model.module
        elif (inside := uncompiled(model)) is not model:
            model = inside
        else:
            return model, wrappers


def comms_of(wrappers: Sequence[nn.Module]) -> list[Comm]:
    """The groups of ranks over which a model is spread, one after another."""
    for one in wrappers:
        if isinstance(one, ShardedDDP):
            return [sharding_of(one)[0].comm]
        if isinstance(one, FSDP):
            return running_model(one).comms
        if isinstance(one, DistributedDataParallel) and dist.is_initialized():
            return [Comm(one.process_group)]
    return [Comm.default()]  # after destroy_process_group() a rank has its own weights


def prepared(optimizer: Optimizer) -> Optimizer:
    """The optimizer that Accelerate or Lightning has wrapped in one of theirs, which shows its state and passes calls
    on. An optimizer with state of its own beside another's is returned as it is, unless the other is an OSS."""
    inside = getattr(optimizer, "optimizer", None)
    while isinstance(inside, OSS) or (isinstance(inside, Optimizer) and inside.state is optimizer.state):
        optimizer, inside = inside, getattr(inside, "optimizer", None)
    return optimizer
