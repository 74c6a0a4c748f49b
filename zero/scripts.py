"""For scripts, the same at any stage: the norm of gradients and clipping, gradient accumulation, the number of
parameters, and the plain module. full_state.py has weights and optimizer state in full."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import NamedTuple, ParamSpec

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from zero._torch.compiling import unwrapped_of_torchs
from zero._torch.modules import parameters_of, params_of_each
from zero.comm.waiting import calling
from zero.fsdp import FSDP
from zero.fsdp.full_weights import named_tensors
from zero.fsdp.model import models_of
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import take_out_of
from zero.wrap.ddp import averaged_by_others
from zero.wrappers import Wrapped, comms_of, each, params_in, refuse_other, take_out, unwrapped


class ParameterCount(NamedTuple):
    """What `count_parameters` returns."""

    all: int
    trained: int
    here: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """How many parameters a model has, at any stage, as (all, trained, here).

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

    Call it on every rank between backward and step, also at stage 0, as torch's `get_total_norm`. It finds the
    gradients of several models and optimizers, and counts parts of tensor parallelism.

    model, optimizer: those that train, also several optimizers. norm_type: 1, 2, any p > 0, or inf.
    """
    return _norm(model, optimizer, norm_type)[0]


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
    norm, clips = _norm(model, optimizer, norm_type)
    for clip in clips:
        clip(norm, float(max_norm))
    return norm


def _norm(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], norm_type: float
) -> tuple[Tensor, list[Callable[[Tensor, float], object]]]:
    """Collective. The norm of all gradients, as one vector, and what scales them, given that norm and the largest: of
    each FSDP, of each OSS, and of what is full on every rank."""
    (inner, wrappers), optimizers = unwrapped(model), each(optimizer)
    sharding = [one for one in optimizers if isinstance(one, OSS)]
    full = dict.fromkeys(param for one in optimizers if not isinstance(one, OSS) for param in params_in(inner, one))
    norms: list[Tensor] = []
    clips: list[Callable[[Tensor, float], object]] = []
    for sharded, _ in models_of(inner):
        if own := [param for param in full if param in sharded.index]:
            norms.append(sharded.grad_norm(float(norm_type), own))
            clips.append(partial(sharded.clip, params=own))
            for param in own:
                del full[param]
    for one in sharding:
        norms.append(one.grad_norm(norm_type))
        clips.append(partial(_clip_owned, one))
    shown = [param for one in sharding if not one.gradients.are_sharded for param in params_of(one)]
    _refuse_unaveraged(inner, wrappers, [*full, *shown])
    if full or not norms:
        norms.append(get_total_norm([param.grad for param in full if param.grad is not None], norm_type))
        clips.append(lambda norm, most: clip_grads_with_norm_([*full], most, norm))
    return norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type), clips


def _clip_owned(optimizer: OSS, norm: Tensor, max_norm: float) -> None:
    optimizer.gradients.clip(max_norm, norm)


def _refuse_unaveraged(inner: nn.Module, wrappers: Sequence[Wrapped], params: Sequence[nn.Parameter]) -> None:
    """Collective where some of these parameters are in no wrapper, beside others that are: raises ValueError on every
    rank if their gradients differ between ranks. Whoever averages them by hand has the same everywhere."""
    averaging = (one for one in wrappers if isinstance(one, DistributedDataParallel | ShardedDDP))
    averaged = {param for one in averaging for param in params_of_each(one)} if params else set()
    left = [param for param in params if param.requires_grad and param not in averaged] if wrappers else []
    elsewhere = averaged_by_others(None) if left else set()
    left = [param for param in left if param not in elsewhere]
    if not left:
        return
    names = {tensor: name for name, tensor in named_tensors(inner).items()}
    gradients = [None if param.grad is None else param.grad.detach() for param in left]
    # Two numbers, as gradients of one element are often opposite.
    ranks = [[one if one is None else [one.norm().item(), one.sum().item()] for one in gradients]]
    for comm in comms_of(wrappers):
        ranks = [one for text in comm.all_gather_text(json.dumps(ranks)) for one in json.loads(text)]
    for param, first, *others in zip(left, *ranks, strict=True):
        if other := next((rank for rank, one in enumerate(others, 1) if repr(one) != repr(first)), None):
            raise ValueError(
                f"{names.get(param, 'a parameter')} is in no wrapper, and nobody averages its gradient: norm and sum "
                f"are {first} on rank 0, {others[other - 1]} on rank {other}. Wrap the module that holds it, too, or "
                "the model that holds all; or freeze it."
            )


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which backward accumulates gradients without sending them, at any stage; the first backward
    outside sends all. Run forward and backward inside. Without other ranks nothing is sent anyway."""
    return _without_sending(unwrapped(model)[1])


@contextmanager
def _without_sending(wrappers: Sequence[Wrapped]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in wrappers:
            stack.enter_context(one.no_sync())
        yield


def unwrap(model: nn.Module) -> nn.Module:
    """Collective. The plain module, with full parameters on every rank. It can be wrapped again at any stage.

    Takes FSDP, ShardedDDP and DistributedDataParallel, also inside of torch.compile, and modules that contain them; a
    plain module is returned as it is. Parameters stay the same objects; gradients are cleared at stages 2 and 3. There
    the wrapper, and the optimizers that stepped shards, raise RuntimeError from then on: save the optimizer's full
    state before, and load it into the next optimizer.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    inner, wrappers = unwrapped(model)
    for wrapper in wrappers:
        if isinstance(wrapper, FSDP | ShardedDDP):
            wrapper.unwrap()
        take_out_of(wrapper.module)
    take_out(inner)
    return inner if isinstance(unwrapped_of_torchs(model), Wrapped) else model
