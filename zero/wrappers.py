"""What is inside of wrappers: the module of a wrapped or compiled model, the optimizer in that of another library."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch import uncompiled
from zero.fsdp import FSDP
from zero.oss import OSS
from zero.sdp import ShardedDDP

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


def prepared(optimizer: Optimizer) -> Optimizer:
    """The optimizer that Accelerate or Lightning has wrapped in one of theirs, which shows its state and passes calls
    on. An optimizer with state of its own beside another's is returned as it is, unless the other is an OSS."""
    inside = getattr(optimizer, "optimizer", None)
    while isinstance(inside, OSS) or (isinstance(inside, Optimizer) and inside.state is optimizer.state):
        optimizer, inside = inside, getattr(inside, "optimizer", None)
    return optimizer
