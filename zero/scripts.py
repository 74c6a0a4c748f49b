"""What scripts ask of a model at any stage: its weights in full, how many parameters it has, the plain module back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero._torch import children_of, uncompiled
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.full_weights import Recipient, full_weights
from zero.fsdp.summon import units_of
from zero.sdp import ShardedDDP


def full_state_dict(
    model: nn.Module, to: int | None = None, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Collective. The full weights as copies, under the module's own names, whatever wraps it.

    Of FSDP, ShardedDDP, DistributedDataParallel, plain modules, and modules inside of these. Tied parameters share one
    copy. What is sharded is gathered unit by unit: beside the result a rank that gets it holds one unit at most, and
    others hold nothing.

    to: the rank of the model's process group that gets the weights; others send theirs and get an empty dictionary. In
        hybrid strategies ranks count through the first replica first. By default every rank gets them.
    device: where the weights go, such as "cpu" for a model that is larger than a GPU; by default where they are.

    Raises ValueError where `to` is no rank of the group, RuntimeError within forward and backward.
    """
    inner = model.module if isinstance(model, (DistributedDataParallel, FSDP)) else model
    if isinstance(model, ShardedDDP):
        comm, inner = model.comm, model.module  # which waits for parameters that are on their way
    else:
        comm = _comm_of(model)
    return full_weights(inner, comm, Recipient(to, device))


def _comm_of(model: nn.Module) -> Comm:
    if not (dist.is_available() and dist.is_initialized()):  # or no longer: its own weights a rank still has
        return Comm.alone()
    if isinstance(model, DistributedDataParallel):
        return Comm(model.process_group)
    return Comm(None)


class ParameterCount(NamedTuple):
    """Elements of parameters; tied ones count once.

    all, trained: of the whole model. here: of what this rank holds of it, at rest.
    """

    all: int
    trained: int
    here: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """How many parameters a model has, at any stage, where `param.numel()` would count a shard. Sends nothing."""
    inner = model.module if isinstance(model, FSDP) else model
    groups = [group for unit in units_of(inner) for group in unit.groups]
    full = {param: numel for group in groups for param, numel in zip(group.params, group.layout.numels, strict=True)}
    own = {
        param: group.spans[index].numel if index in group.spans else 0
        for group in groups
        for index, param in enumerate(group.params)
    }
    params = [*inner.parameters()]
    return ParameterCount(
        sum(full.get(param, param.numel()) for param in params),
        sum(full.get(param, param.numel()) for param in params if param.requires_grad),
        sum(own.get(param, param.numel()) for param in params),
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Collective. The plain module back, with full parameters on every rank, free to be wrapped again at any stage.

    Of FSDP, ShardedDDP and DistributedDataParallel, also inside of torch.compile, and of modules that hold some; a
    plain module comes back as it is. Parameters are the objects they were; gradients are cleared at stages 2 and 3.
    There the wrapper, and the optimizers that stepped shards, raise RuntimeError from then on: save the optimizer's
    full state before, and load it into the next one.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    plain = _without_wrapper(model)
    for module in plain.modules():
        for name, child in children_of(module).items():
            if child is not None and (inside := _without_wrapper(child)) is not child:
                children_of(module)[name] = inside
    return plain


def _without_wrapper(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, (FSDP, ShardedDDP)):
            module = module.unwrap()
        elif isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance((inside := uncompiled(module)), (FSDP, ShardedDDP, DistributedDataParallel)):
            module = inside
        else:
            return module
