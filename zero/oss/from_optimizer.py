"""OSS.from_optimizer: an OSS that takes over the groups, options, names and state of an existing optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from zero._torch import call_stepped
from zero.comm import Comm
from zero.measure.built import argument_names
from zero.measure.param_groups import called


def from_optimizer(
    sharded: Any,
    optimizer: Optimizer,
    group: torch.distributed.ProcessGroup | None,
    *,
    optim: Callable[..., Optimizer] | None = None,
    **options: Any,
) -> Any:
    """Collective. Builds an OSS from `optimizer`, which raises RuntimeError if it is stepped from now on.

    All groups, also empty ones, keep their options and names. Schedulers of `optimizer` set the rates of the OSS. The
    state, which must be the same on every rank, moves to the OSS.

    sharded: OSS, or a class made of it.
    optimizer: built of full parameters, before or after ShardedDDP or DistributedDataParallel wraps the model.
    group, options: see OSS.
    optim: builds the optimizer again, for classes that do not store their arguments: the class, or a functools.partial
        of it with the arguments that differ from its defaults.

    Raises ValueError on every rank for anything but a torch optimizer, for an OSS, for arguments that the optimizer
    does not store, and for state that does not fit; TypeError for unknown options.
    """
    kept: dict[str, Any] = {}
    problem = None
    if not isinstance(optimizer, Optimizer):
        problem = f"OSS.from_optimizer was given a {type(optimizer).__name__}. Pass a torch.optim.Optimizer."
    elif isinstance(optimizer, sharded):
        problem = "OSS.from_optimizer was given an OSS, which shards its state already. Use it as it is."
    elif optim is None:
        kept, missing = arguments(optimizer)
        if missing:
            name = called(type(optimizer))
            problem = (
                f"{name} does not keep what it was built with: {', '.join(missing)} is neither in its defaults nor an "
                f"attribute. Pass optim={name}, or a functools.partial of it with the arguments that are not its "
                "defaults."
            )
    states = len(optimizer.state) if problem is None else 0
    signature = [f"optimizer {type(optimizer).__name__} with state of {states} parameters"]
    Comm(group).compare("the optimizers given to OSS.from_optimizer", signature, problem)
    found = optimizer.state_dict() if states else None
    groups = [{**one, "params": [*one["params"]]} for one in optimizer.param_groups]
    built = sharded(groups, optim or type(optimizer), group, **options, **kept)
    if found is not None:
        built.load_state_dict(found)
    optimizer.state.clear()
    optimizer.param_groups = built.param_groups  # into which its schedulers go on to write
    call_stepped(optimizer)
    optimizer.register_step_pre_hook(_refuse_step)
    return built


def arguments(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """The arguments that the optimizer was built with and stores, and the names of those that it does not store."""
    names, held = [*argument_names(type(optimizer))], {**vars(optimizer), **optimizer.defaults}
    return {name: held[name] for name in names if name in held}, [name for name in names if name not in held]


def _refuse_step(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"this {type(optimizer).__name__} was given to OSS.from_optimizer, and would step full parameters on each rank "
        "by itself. Step the OSS that it returned."
    )
