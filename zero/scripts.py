"""For scripts, the same at any stage: the norm of gradients and clipping, gradient accumulation, the number of
parameters, and the plain module. full_state.py has weights and optimizer state in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import NamedTuple, ParamSpec

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_plain
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from zero._torch.compiling import unwrapped_of_torchs
from zero._torch.modules import children_of, parameters_of
from zero.comm.waiting import calling
from zero.fsdp import FSDP
from zero.fsdp.model import models_of
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import take_out_of
from zero.wrappers import Wrapped, params_in, prepared, refuse_other, unwrapped


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
    refuse_other(model)
    inner = model.module if isinstance(model, FSDP) else model
    counts = {param: (parts.numel(param, param.numel()), param.numel()) for param in parameters_of(inner)}
    for group in (group for _, units in models_of(inner) for unit in units for group in unit.groups):
        for index, (param, numel) in enumerate(zip(group.params, group.layout.numels, strict=True)):
            if param in counts:
                here = group.shapes.spans[index].numel if index in group.shapes.spans else 0
                counts[param] = parts.numel(param, numel), here
    return ParameterCount(
        sum(full for full, _ in counts.values()),
        sum(full for param, (full, _) in counts.items() if param.requires_grad),
        sum(here for _, here in counts.values()),
    )


P = ParamSpec("P")


def _of_gradients(write: str) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Around a function whose namesake in torch takes parameters: tells who calls it so what to write."""

    def around(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> Tensor:
            try:
                model, optimizer, *_ = signature(function).bind(*args, **given).args
            except TypeError as error:
                raise TypeError(f"{error}: write {write}, with the model and its optimizer.") from None
            refuse_other(model, f", and its optimizer: {write}")
            if not isinstance(optimizer, Optimizer | Iterable):
                raise TypeError(f"a {type(optimizer).__name__} stands where the optimizer belongs: write {write}.")
            return function(*args, **given)

        return call

    return around


@_of_gradients("zero.grad_norm(model, optimizer)")
@calling("zero.grad_norm")
def grad_norm(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], norm_type: float = 2.0) -> Tensor:
    """Collective at stages 1 to 3. The norm of all gradients that the optimizer steps, as one vector, 0-dim, the same
    on every rank.

    Call it on every rank between backward and step, also at stage 0. At stages 2 and 3 a rank has shards of gradients
    only, and a norm that is computed from `param.grad` is an error.

    model, optimizer: those that train, also several optimizers. norm_type: 1, 2, any p > 0, or inf.
    """
    wrapped, optimizers = unwrapped_of_torchs(model), _each(optimizer)
    if isinstance(wrapped, FSDP):
        return wrapped.grad_norm(norm_type, params=[param for one in optimizers for param in params_in(wrapped, one)])
    if sharding := [one for one in optimizers if isinstance(one, OSS)]:
        return _norm(sharding, norm_type)
    gradients = [param.grad for one in optimizers for param in params_of(one) if param.grad is not None]
    return get_total_norm(gradients, norm_type)


@_of_gradients("zero.clip_grad_norm_(model, optimizer, max_norm)")
@calling("zero.clip_grad_norm_")
def clip_grad_norm_(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Collective at stages 1 to 3. Scales all gradients that the optimizer steps so that their norm, as one vector, is
    at most max_norm.

    Returns the norm before, 0-dim, the same on every rank. Call it on every rank between backward and step, in place of
    torch's function of this name, at any stage. Arguments are those of `grad_norm`.
    """
    wrapped, optimizers = unwrapped_of_torchs(model), _each(optimizer)
    if isinstance(wrapped, FSDP):
        params = [param for one in optimizers for param in params_in(wrapped, one)]
        return wrapped.clip_grad_norm_(max_norm, norm_type, params=params)
    if sharding := [one for one in optimizers if isinstance(one, OSS)]:
        norm = _norm(sharding, norm_type)
        for one in sharding:
            one.gradients.clip(float(max_norm), norm)
        return norm
    return clip_plain([param for one in optimizers for param in params_of(one)], max_norm, norm_type)


def _each(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [prepared(one) for one in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]


def _norm(sharding: Sequence[OSS], norm_type: float) -> Tensor:
    """Collective. The norm of the gradients of all of these, as one vector."""
    norms = [one.grad_norm(norm_type) for one in sharding]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which backward accumulates gradients without sending them, at any stage; the first backward
    outside sends all. Run forward and backward inside. Without other ranks nothing is sent anyway."""
    refuse_other(model)
    wrapped = unwrapped_of_torchs(model)
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
