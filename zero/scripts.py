"""For scripts, the same at any stage: weights and optimizer state in full, the norm of gradients and clipping, gradient
accumulation, the number of parameters, and the plain module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_plain
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from zero._torch import children_of, name_without_compile, named_as_compiled, uncompiled, warn_user
from zero.comm import Comm
from zero.comm.waiting import calling
from zero.fsdp import FSDP
from zero.fsdp.full_weights import Recipient, full_weights
from zero.fsdp.model import models, models_of
from zero.fsdp.weights_from_first import load_weights
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.state.from_first import first_alone, load_state
from zero.state.optimizer_state import refuse_no_rank, refuse_other_shard
from zero.state.own_dtypes import keep_dtypes
from zero.state.shard_mark import marks_of
from zero.state.stepped import SteppedShards, of_user
from zero.state.whole import consolidate_whole
from zero.tensor_parallel import parts
from zero.tensor_parallel.parts import is_first
from zero.tensor_parallel.shown import take_out_of
from zero.wrappers import Wrapped, comms_of, prepared, unwrapped


@calling("zero.full_state_dict")
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

    Weights of a tensor parallel model are whole tensors; `to` then means one of the ranks that have the parts.

    Raises ValueError where `to` is no rank of the group, RuntimeError within forward and backward.
    """
    inner, wrappers = unwrapped(model)
    receives = to is None or is_first(inner.parameters())
    full = full_weights(inner, comms_of(wrappers)[0], Recipient(to, device))
    return {name_without_compile(name): value for name, value in full.items()} if receives else {}


@calling("zero.load_full_state_dict")
def load_full_state_dict(model: nn.Module, weights: Mapping[str, Any] | None, strict: bool = True) -> Any:
    """Collective. Loads full weights into a model of any stage: what `full_state_dict` returns, or a file of the plain
    model's. Returns what `load_state_dict` does: missing and unexpected names.

    weights: by the module's own names, with or without `_orig_mod.` of torch.compile. If all names begin with
        `module.`, as in files of DistributedDataParallel, that is taken off with a warning. Either the same on every
        rank, or on rank 0 alone, with None or {} on all others: those then receive rank 0's unit by unit at stage 3,
        and hold one full unit at most; rank 0 needs the model's size once more in the host's memory.

    Raises ValueError on every rank if names or shapes differ between ranks, if neither rank 0 nor every rank has
    weights, and for what does not fit of those that rank 0 alone has. Raises RuntimeError within forward and backward,
    and as `load_state_dict` for other names.
    """
    inner, wrappers = unwrapped(model)
    comms = comms_of(wrappers)
    what = "the weights given to zero.load_full_state_dict"
    if first_alone(comms, what, weights, inner.parameters()):
        return load_weights(inner, comms, lambda: inner.load_state_dict(_of_first(inner, weights or {}), strict))
    weights = weights or {}
    shapes = [f"{name}: {list(value.shape)}" for name, value in weights.items() if isinstance(value, Tensor)]
    comms[0].compare(what, sorted(shapes))
    sharding: list[nn.Module] = [one for one in wrappers if isinstance(one, FSDP | ShardedDDP)]
    return (sharding or [inner])[0].load_state_dict(_named(inner, weights), strict)


def _named(inner: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the weights by the names that the module has now."""
    if weights and all(name.startswith("module.") for name in weights) and not hasattr(inner, "module"):
        warn_user(
            "all names of the weights begin with 'module.', as those that DistributedDataParallel saves: it is taken "
            "off, and the rest is loaded."
        )
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return named_as_compiled(inner, weights)


def _of_first(inner: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """As _named, of weights that only rank 0 has. Raises ValueError for what the other ranks would not get."""
    if any(isinstance(one, FSDP) for one in inner.modules()):
        raise ValueError("the model contains an FSDP, but is none. Pass the weights on every rank.")
    for name, value in weights.items():
        if not isinstance(value, Tensor) or name.endswith("_extra_state"):
            raise ValueError(f"{name!r} is extra state, and only tensors are sent. Pass the weights on every rank.")
    return _named(inner, weights)


@calling("zero.full_optimizer_state_dict")
def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, to: int | None = None) -> dict[str, Any]:
    """Collective. The full state of the optimizer in the plain optimizer's own format, at any stage.

    It loads by `load_full_optimizer_state_dict` at any other stage and number of ranks, and into the plain optimizer.

    model, optimizer: those that train. to: the rank of the model's process group that gets the state; others get an
        empty dictionary. By default every rank gets it.

    Raises ValueError on every rank for state that cannot be made whole, and where `to` is no rank of the group.
    """
    (inner, wrappers), optimizer = unwrapped(model), prepared(optimizer)
    if wrappers and isinstance(wrappers[0], FSDP):
        _params_in(wrappers[0], optimizer)
        return wrappers[0].optim_state_dict(optimizer, to) or {}
    if sharded := models_of(inner):  # one or several FSDP inside of a plain module
        return consolidate_whole(_stepped(inner, optimizer, sharded[0][0].comm), to) or {}
    comm = optimizer.comm if isinstance(optimizer, OSS) else comms_of(wrappers)[0]
    refuse_no_rank(to, comm.world)
    if isinstance(optimizer, OSS):
        optimizer.consolidate_state_dict(to)
    receives = to is None or (to == comm.rank and is_first(params_of(optimizer)))
    return optimizer.state_dict() if receives else {}


@calling("zero.load_full_optimizer_state_dict")
def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Collective. Loads full optimizer state at any stage: what `full_optimizer_state_dict` returns, or the state of
    the plain optimizer.

    state_dict: the same on every rank, or on rank 0 alone, with None or {} on all others. Those then receive the state
        parameter by parameter, and hold the full tensors of one besides their shards.

    Raises ValueError, and changes nothing, if it does not fit: on every rank if rank 0 alone has it, or if neither rank
    0 nor every rank has it.
    """
    (inner, wrappers), optimizer = unwrapped(model), prepared(optimizer)
    sharded = wrappers[0] if wrappers and isinstance(wrappers[0], FSDP) else None
    comms = [optimizer.comm] if isinstance(optimizer, OSS) else comms_of(wrappers)
    if sharded is not None:
        _params_in(sharded, optimizer)
    alone = first_alone(
        comms, "the state given to zero.load_full_optimizer_state_dict", state_dict, params_of(optimizer)
    )
    state_dict = state_dict or {}
    if not alone:
        _refuse_shard(_stepped(inner, optimizer, comms[0]), comms, state_dict)
    if alone:
        if sharded is not None:
            sharded.reshard()
        load_state(_stepped(inner, optimizer, comms[0]), comms, state_dict)
    elif sharded is not None:
        sharded.load_optim_state_dict(optimizer, state_dict)
    else:
        optimizer.load_state_dict(state_dict)
        if not isinstance(optimizer, OSS):
            keep_dtypes(optimizer, state_dict)


def _refuse_shard(stepped: SteppedShards, comms: Sequence[Comm], state_dict: dict[str, Any]) -> None:
    """Collective. Raises ValueError on every rank where any was given the shard of another."""
    problem, what = None, "the state given to zero.load_full_optimizer_state_dict"
    try:
        refuse_other_shard(stepped, marks_of(state_dict), "Load what zero.full_optimizer_state_dict returns.")
    except ValueError as error:
        problem = str(error)
    for comm in comms:
        comm.compare(what, [], problem)


def _stepped(inner: nn.Module, optimizer: Optimizer, comm: Comm) -> SteppedShards:
    """What holds an optimizer's state; at stage 0 none of it is a shard."""
    if isinstance(optimizer, OSS):
        return optimizer.stepped_shards
    sharded = [model for model, _ in models_of(inner)]
    groups = [group for model in sharded for group in model.index.groups]
    return of_user(optimizer, groups, sharded[0].comm if sharded else comm)


def _params_in(model: FSDP, optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters. Raises ValueError, on every rank alike, if some are of another model that is sharded:
    they travel with that one's."""
    params = params_of(optimizer)
    foreign = {*params} - {*model.parameters()}
    others = (group for one in models() for group in one.index.groups if not foreign.isdisjoint(group.params))
    for group in others if foreign else ():
        name = next(name for param, name in zip(group.params, group.names, strict=True) if param in foreign)
        raise ValueError(
            f"the {type(optimizer).__name__} also steps {name} of another FSDP than this one of "
            f"{type(model.module).__name__}. Build one optimizer for each model, or pass the module that holds both."
        )
    return params


class ParameterCount(NamedTuple):
    """What `count_parameters` returns."""

    all: int
    trained: int
    here: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """How many parameters a model has, at any stage, as (all, trained, here); `param.numel()` would count a shard.

    all, trained: elements of the full model, of all parameters and of those that require a gradient. here: of this
    rank's shards. Tied parameters count once. Sends nothing.
    """
    inner = model.module if isinstance(model, FSDP) else model
    counts = {param: (parts.numel(param, param.numel()), param.numel()) for param in inner.parameters()}
    for group in (group for _, units in models_of(inner) for unit in units for group in unit.groups):
        for index, (param, numel) in enumerate(zip(group.params, group.layout.numels, strict=True)):
            if param in counts:
                here = group.spans[index].numel if index in group.spans else 0
                counts[param] = parts.numel(param, numel), here
    return ParameterCount(
        sum(full for full, _ in counts.values()),
        sum(full for param, (full, _) in counts.items() if param.requires_grad),
        sum(here for _, here in counts.values()),
    )


@calling("zero.grad_norm")
def grad_norm(model: nn.Module, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
    """Collective at stages 1 to 3. The norm of all gradients that the optimizer steps, as one vector, 0-dim, the same
    on every rank.

    Call it on every rank between backward and step, also at stage 0. At stages 2 and 3 a rank has shards of gradients
    only, and a norm that is computed from `param.grad` is an error.

    model, optimizer: those that train. norm_type: 1, 2, any p > 0, or inf.
    """
    wrapped, optimizer = uncompiled(model), prepared(optimizer)
    if isinstance(wrapped, FSDP):
        return wrapped.grad_norm(norm_type, params=_params_in(wrapped, optimizer))
    if isinstance(optimizer, OSS):
        return optimizer.grad_norm(norm_type)
    gradients = [param.grad for param in params_of(optimizer) if param.grad is not None]
    return get_total_norm(gradients, norm_type)


@calling("zero.clip_grad_norm_")
def clip_grad_norm_(model: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Collective at stages 1 to 3. Scales all gradients that the optimizer steps so that their norm, as one vector, is
    at most max_norm.

    Returns the norm before, 0-dim, the same on every rank. Call it on every rank between backward and step, in place of
    torch's function of this name, at any stage. Arguments are those of `grad_norm`.
    """
    wrapped, optimizer = uncompiled(model), prepared(optimizer)
    if isinstance(wrapped, FSDP):
        return wrapped.clip_grad_norm_(max_norm, norm_type, params=_params_in(wrapped, optimizer))
    if isinstance(optimizer, OSS):
        return optimizer.clip_grad_norm(max_norm, norm_type)
    return clip_plain(params_of(optimizer), max_norm, norm_type)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which backward accumulates gradients without sending them, at any stage; the first backward
    outside sends all. Run forward and backward inside. Without other ranks nothing is sent anyway."""
    wrapped = uncompiled(model)
    return wrapped.no_sync() if isinstance(wrapped, Wrapped) else nullcontext()


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
        take_out_of(module)
    return module
