"""For scripts, at any stage: full weights, the norm of gradients, the number of parameters, and the plain module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from zero._torch import children_of, name_without_compile, uncompiled
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.model import models_of
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.state.weights import Recipient, full_weights
from zero.wrappers import unwrapped


def full_state_dict(
    model: nn.Module, to: int | None = None, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Collective. The full weights as copies, under the module's own names, whatever wraps it.

    Takes FSDP, ShardedDDP, DistributedDataParallel, plain modules, and modules inside of these, compiled or not. Tied
    parameters share one copy. Shards are gathered unit by unit: besides the result, a rank that gets it holds at most
    one unit, and other ranks hold nothing.

    to: the rank of the model's process group that gets the weights; others send theirs and get an empty dictionary. In
        hybrid strategies ranks are numbered through the first replica first. By default every rank gets the weights.
    device: the weights' device, such as "cpu" for a model that is larger than a GPU; by default that of the parameters.

    Raises ValueError where `to` is no rank of the group, RuntimeError within forward and backward.
    """
    inner, wrappers = unwrapped(model)
    full = full_weights(inner, _comm_of(wrappers), Recipient(to, device))
    return {name_without_compile(name): value for name, value in full.items()}


def _comm_of(wrappers: Sequence[nn.Module]) -> Comm:
    for one in wrappers:
        if isinstance(one, ShardedDDP):
            return one.comm
        if isinstance(one, DistributedDataParallel) and dist.is_initialized():
            return Comm(one.process_group)
    return Comm.default()  # after destroy_process_group() a rank has its own weights


class ParameterCount(NamedTuple):
    """Elements of parameters; tied ones count once.

    all, trained: of the full model, all parameters and those that require a gradient. here: of this rank's shards.
    """

    all: int
    trained: int
    here: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """How many parameters a model has, at any stage; `param.numel()` would count a shard. Sends nothing."""
    inner = model.module if isinstance(model, FSDP) else model
    counts = {param: (param.numel(), param.numel()) for param in inner.parameters()}
    for group in (group for _, units in models_of(inner) for unit in units for group in unit.groups):
        for index, (param, numel) in enumerate(zip(group.params, group.layout.numels, strict=True)):
            if param in counts:
                counts[param] = numel, group.spans[index].numel if index in group.spans else 0
    return ParameterCount(
        sum(full for full, _ in counts.values()),
        sum(full for param, (full, _) in counts.items() if param.requires_grad),
        sum(here for _, here in counts.values()),
    )


def grad_norm(model: nn.Module, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
    """Collective at stages 1 to 3. The norm of all gradients, as one vector, 0-dim, the same on every rank.

    Call it on every rank between backward and step, also at stage 0. At stages 2 and 3 a rank has shards of gradients
    only: a norm that is computed from `param.grad` is another one at stage 3, and an error at stage 2.

    model, optimizer: those that train. norm_type: 1, 2, any p > 0, or inf.
    """
    wrapped = uncompiled(model)
    if isinstance(wrapped, FSDP):
        return wrapped.grad_norm(norm_type)
    if isinstance(optimizer, OSS):
        return optimizer.grad_norm(norm_type)
    gradients = [param.grad for param in params_of(optimizer) if param.grad is not None]
    return get_total_norm(gradients, norm_type)


def unwrap(model: nn.Module) -> nn.Module:
    """Collective. The plain module, with full parameters on every rank. It can be wrapped again at any stage.

    Takes FSDP, ShardedDDP and DistributedDataParallel, also inside of torch.compile, and modules that contain them; a
    plain module is returned as it is. Parameters stay the same objects; gradients are cleared at stages 2 and 3. There
    the wrapper, and the optimizers that stepped shards, raise RuntimeError from then on: save the optimizer's full
    state before, and load it into the next optimizer.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    plain = _without_wrapper(model)
    for module in plain.modules():
        for name, child in children_of(module).items():
            if child is not None and (inside := _without_wrapper(child)) is not child:
                children_of(module)[name] = inside
    return plain


def _without_wrapper(module: nn.Module) -> nn.Module:
    for wrapper in unwrapped(module)[1]:
        module = wrapper.unwrap() if isinstance(wrapper, FSDP | ShardedDDP) else wrapper.module
    return module
