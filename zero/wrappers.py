"""What is inside of wrappers, and which wrappers are inside of a module; the groups of their ranks, the optimizer in
that of another library, and what that steps. For scripts: accumulation without sending, and the plain module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.compiling import unwrapped_of_torchs
from zero._torch.modules import children_of, modules_of, params_of_each
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.fsdp.full_weights import named_tensors
from zero.fsdp.model import Model, models, models_of
from zero.measure.param_groups import params_of, steps
from zero.oss import OSS
from zero.oss.optimizer import optimizers
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import comm_of
from zero.state.gathered import refuse_no_rank
from zero.state.stepped import SteppedShards, of_user, refuse_retired
from zero.tensor_parallel.shown import take_out_of

Wrapped = DistributedDataParallel | ShardedDDP | FSDP


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[Wrapped]]:
    """The user's own module, and all wrappers of the model, those around it first. torch.compile's is none."""
    inner, wrappers = around(model)
    return inner, [*wrappers, *(one for one in modules_of(inner) if isinstance(one, Wrapped))]


def around(model: nn.Module) -> tuple[nn.Module, list[Wrapped]]:
    """As `unwrapped`, with the wrappers around the user's module alone."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a {type(model).__name__} stands where the model belongs. Pass the model that zero.setup or a wrapper "
            "returned; several models in one module, such as nn.ModuleList."
        )
    wrappers: list[Wrapped] = []
    while True:
        if isinstance(model, Wrapped):
            wrappers.append(model)
            model = model.module
        elif (inside := unwrapped_of_torchs(model)) is not model:
            model = inside
        else:
            return model, wrappers


def take_out(module: nn.Module) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Puts the modules inside of wrappers, in a module, where these are. Returns what stood where."""
    replaced = []
    for holder in module.modules():
        for name, child in children_of(holder).items():
            inside, wrappers = (child, []) if child is None else around(child)
            if child is not None and wrappers:
                replaced.append((children_of(holder), name, child))
                children_of(holder)[name] = inside
    return replaced


@contextmanager
def taken_out(module: nn.Module) -> Iterator[None]:
    """In this context a module that contains wrappers is as the user wrote it, with the names of its state_dict()."""
    replaced = take_out(module)
    try:
        yield
    finally:
        for children, name, child in replaced:
            children[name] = child


def comms_of(wrappers: Sequence[nn.Module]) -> list[Comm]:
    """The groups of ranks over which a model is spread. Raises ValueError alike where wrappers have different ones."""
    found: list[tuple[Any, list[Comm]]] = []
    for wrapper in wrappers:
        if isinstance(wrapper, ShardedDDP):
            found.append((wrapper, [comm_of(wrapper)]))
        elif isinstance(wrapper, FSDP):
            found.append((wrapper, running_model(wrapper).comms))
        elif dist.is_initialized():
            found.append((wrapper, [Comm(wrapper.process_group)]))  # type: ignore[arg-type]
    for one in found:
        if [comm.group for comm in one[1]] != [comm.group for comm in found[0][1]]:
            told = []
            for wrapper, comms in (found[0], one):
                over = [str(dist.get_process_group_ranks(each.group) if each.group else "this alone") for each in comms]
                inside = type(wrapper.module).__name__
                told.append(f"{type(wrapper).__name__}({inside}) over the ranks {' and '.join(over)}")
            raise ValueError(
                f"the model contains wrappers over different process groups: {' and '.join(told)}. Wrap both over one "
                "process group, or call this for each."
            )
    return found[0][1] if found else [Comm.default()]  # after destroy_process_group() a rank has its own weights


def prepared(optimizer: Optimizer) -> Optimizer:
    """The optimizer that Accelerate or Lightning has wrapped in one of theirs, which shows its state and passes calls
    on. An optimizer with state of its own beside another's is returned as it is, unless the other is an OSS."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a {type(optimizer).__name__} stands where an optimizer belongs.")
    inside = getattr(optimizer, "optimizer", None)
    while isinstance(inside, OSS) or (isinstance(inside, Optimizer) and inside.state is optimizer.state):
        optimizer, inside = inside, getattr(inside, "optimizer", None)
    return optimizer


def each(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """`prepared`, of one or of several."""
    several: Any = optimizer
    if isinstance(optimizer, Optimizer | nn.Module) or not isinstance(optimizer, Iterable):
        several = [optimizer]
    return [prepared(one) for one in several]


def stepped_for(
    inner: nn.Module, wrappers: Sequence[nn.Module], optimizer: Optimizer, to: int | None
) -> tuple[SteppedShards, int | None, bool]:
    """What holds an optimizer's state, rank `to` in its group, and whether this rank takes part."""
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
    """What holds an optimizer's state; at stage 0 none of it is a shard. Raises ValueError alike where some is of a
    sharded model that is not in the module, and RuntimeError for an optimizer that was retired."""
    refuse_retired(optimizer)
    stepped: SteppedShards | None = getattr(optimizer, "stepped_shards", None)  # of OSS and EMA
    if stepped is not None:
        return stepped
    foreign = {*params_of(optimizer)} - {*params_of_each(inner)}
    others = (group for one in models() for group in one.index.groups if foreign)
    named = (pair for group in others for pair in zip(group.params, group.names, strict=True))
    for name in (name for param, name in named if param in foreign):
        raise ValueError(
            f"the {type(optimizer).__name__} also steps {name} of another FSDP than is given, in "
            f"{type(inner).__name__}. Build one optimizer for each model, or pass the module that holds both."
        )
    sharded = [model for model, _ in models_of(inner)]
    groups = [group for model in sharded for group in model.index.groups]
    return of_user(optimizer, groups, sharded[0].comm if sharded else comms_of(wrappers)[0])


def holders_of(params: Iterable[nn.Parameter]) -> tuple[list[Model], list[OSS], dict[nn.Parameter, nn.Parameter]]:
    """What shards parameters now, and what an optimizer steps of each. Of several OSS the last has taken one."""
    holders: dict[nn.Parameter, Any] = {param: one for one in optimizers() for param in one.shards}
    holders.update((param, one) for one in models() for param in one.index)
    stepped = {param: one.shards[param] if isinstance(one := holders.get(param), OSS) else param for param in params}
    found = dict.fromkeys(holders[param] for param in stepped if param in holders)
    return [one for one in found if isinstance(one, Model)], [one for one in found if isinstance(one, OSS)], stepped


def wrapper_of(optimizer: Optimizer, wrappers: Iterable[nn.Module]) -> nn.Module:
    """The wrapper that holds an optimizer's parameters; a module of several, or of none where none is wrapped."""
    holders = [one for one in wrappers if steps(optimizer, one)]
    return holders[0] if len(holders) == 1 else nn.ModuleList(holders)


def names_of(inner: nn.Module, stepped: SteppedShards) -> dict[int, str]:
    """The names of an optimizer's parameters in streams, by their numbers."""
    names = {one: name for name, one in reversed(named_tensors(inner).items())}
    return {number: names.get(param, str(number)) for number, param in enumerate(params_of(stepped))}


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which backward accumulates gradients without sending them, at any stage; the first backward
    outside sends all. Run forward and backward inside. Without other ranks nothing is sent anyway."""
    wrappers = unwrapped(model)[1]

    @contextmanager
    def without_sending() -> Iterator[None]:
        with ExitStack() as stack:
            for one in wrappers:
                stack.enter_context(one.no_sync())
            yield

    return without_sending()


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
