"""What is inside of wrappers: the module of a wrapped or compiled model and the groups of its ranks, the optimizer in
that of another library, and what that steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.compiling import unwrapped_of_torchs
from zero._torch.modules import parameters_of
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.fsdp.full_weights import named_tensors
from zero.fsdp.model import models, models_of
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of
from zero.state.gathered import refuse_no_rank
from zero.state.stepped import SteppedShards, of_user

Wrapped = DistributedDataParallel | ShardedDDP | FSDP


def refuse_other(model: object, beside: str = "") -> None:
    """Raises TypeError for what is no model. beside: what the call takes, too."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a {type(model).__name__} stands where the model belongs. Pass the model that zero.setup or a wrapper "
            f"returned{beside}; of several models call it for each."
        )


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[Wrapped]]:
    """The user's own module, and what wraps it, from the outside in. torch.compile and
    checkpoint_wrapper are not among the wrappers."""
    refuse_other(model)
    wrappers: list[Wrapped] = []
    while True:
        if isinstance(model, Wrapped):
            wrappers.append(model)
            model = model.module
        elif (inside := unwrapped_of_torchs(model)) is not model:
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
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a {type(optimizer).__name__} stands where an optimizer belongs; of several call it for each.")
    inside = getattr(optimizer, "optimizer", None)
    while isinstance(inside, OSS) or (isinstance(inside, Optimizer) and inside.state is optimizer.state):
        optimizer, inside = inside, getattr(inside, "optimizer", None)
    return optimizer


def stepped_for(
    inner: nn.Module, wrappers: Sequence[nn.Module], optimizer: Optimizer, to: int | None
) -> tuple[SteppedShards, int | None, bool]:
    """Returns what holds the optimizer's state, which rank of its group rank `to` of all is, and whether this rank
    takes part: not in replicas without rank `to`."""
    stepped, sharded = stepped_by(inner, wrappers, optimizer), models_of(inner)
    if not sharded:
        refuse_no_rank(to, stepped.comm.world)
        return stepped, to, True
    placement = sharded[0][0].placement
    refuse_no_rank(to, placement.ranks)
    for unit in (unit for model, _ in sharded for unit in model.units):
        unit.reshard()  # a forward without backward may have left it unsharded
    return (stepped, None, True) if to is None else (stepped, placement.owner(to), placement.has(to))


def stepped_by(inner: nn.Module, wrappers: Sequence[nn.Module], optimizer: Optimizer) -> SteppedShards:
    """What holds an optimizer's state; at stage 0 none of it is a shard."""
    if isinstance(optimizer, OSS):
        return optimizer.stepped_shards
    if wrappers and isinstance(wrappers[0], FSDP):
        params_in(wrappers[0], optimizer)
    sharded = [model for model, _ in models_of(inner)]
    groups = [group for model in sharded for group in model.index.groups]
    return of_user(optimizer, groups, sharded[0].comm if sharded else comms_of(wrappers)[0])


def params_in(model: FSDP, optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters. Raises ValueError, on every rank alike, if some are of another model that is sharded:
    they travel with that one's."""
    params = params_of(optimizer)
    foreign = {*params} - {*parameters_of(model)}
    others = (group for one in models() for group in one.index.groups if not foreign.isdisjoint(group.params))
    for group in others if foreign else ():
        name = next(name for param, name in zip(group.params, group.names, strict=True) if param in foreign)
        raise ValueError(
            f"the {type(optimizer).__name__} also steps {name} of another FSDP than this one of "
            f"{type(model.module).__name__}. Build one optimizer for each model, or pass the module that holds both."
        )
    return params


def names_of(inner: nn.Module, stepped: SteppedShards) -> dict[int, str]:
    """The names of an optimizer's parameters in streams, by their numbers."""
    names = {one: name for name, one in reversed(named_tensors(inner).items())}
    return {number: names.get(param, str(number)) for number, param in enumerate(params_of(stepped))}
