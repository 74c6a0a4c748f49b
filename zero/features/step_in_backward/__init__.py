"""`zero.step_in_backward`; the steps are in steps.py."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from zero._torch import uncompiled
from zero.features.step_in_backward.steps import StepsOfOSS, StepsOfUnits
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of


def step_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    """From now on backward steps parameters as soon as their gradients are with their owner, and frees these.

        zero.step_in_backward(model, optimizer)
        model(inputs).backward()  # steps
        optimizer.step()          # stage 2: brings the stepped shards to every rank; stage 3: nothing is left to do

    A step is as without, bit for bit, and no shard of the gradients outlasts its bucket or unit: with Adam a rank of W
    keeps 12 bytes a parameter / W at stage 3, and 4 + 8 / W at stage 2, where 16 / W and 4 + 12 / W are kept without.
    Call `step` and `zero_grad` as ever, and schedulers after `step`.

    model: a ShardedDDP, of whose optimizers this is one, or an FSDP.
    optimizer: the OSS, or at stage 3 a torch optimizer of all trained parameters, that treats each element by itself.

    What needs all gradients at once raises RuntimeError from then on: clipping by the norm, zero.GradScaler, no_sync, a
    second backward before `step`, a hook before the step. torch.nn.utils.clip_grad_norm_ raises at stage 2; at
    stage 3 it finds no gradients.
    Raises ValueError for other models and optimizers, and where it was called before.
    """
    model = uncompiled(model)
    if isinstance(model, FSDP) and not isinstance(optimizer, OSS):
        running = running_model(model)
        running.steps = StepsOfUnits(optimizer, running)
        return
    if isinstance(model, ShardedDDP) and isinstance(optimizer, OSS):
        if optimizer not in sharding_of(model):
            raise ValueError("zero.step_in_backward was given the optimizer of another model. Pass this model's OSS.")
        optimizer.steps = StepsOfOSS(optimizer)
        return
    raise ValueError(
        f"zero.step_in_backward was given a {type(model).__name__} and a {type(optimizer).__name__}. Pass a ShardedDDP "
        "and its OSS, or an FSDP and a torch optimizer of its parameters."
    )
