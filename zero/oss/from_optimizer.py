"""An optimizer of full parameters that was built before: OSS.from_optimizer, an OSS that continues with its groups,
options, names, state and hooks; and what keeps an optimizer from being sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero._torch.optimizers import call_stepped
from zero.comm import Comm
from zero.comm.together import alike
from zero.measure.built import argument_names
from zero.measure.param_groups import called, params_of
from zero.state import leaves
from zero.state import optimizer_state as state

_given: WeakSet[Optimizer] = WeakSet()
"""Those that were made an OSS of."""


def from_optimizer(
    sharded: Any,
    optimizer: Optimizer,
    process_group: torch.distributed.ProcessGroup | None,
    *,
    optim: Callable[..., Optimizer] | None = None,
    **options: Any,
) -> Any:
    """Collective. Builds an OSS from `optimizer`, which raises RuntimeError if it is stepped, saved or loaded from now
    on.

    All groups, also empty ones, keep their options and names, and remain the same list of the same dictionaries: what
    holds it, such as a scheduler of `optimizer`, sets the rates of the OSS. The state, which must be the same on every
    rank, moves to the OSS, and so do hooks, which their handles remove there.

    sharded: OSS, or a class made of it.
    optimizer: built of full parameters, before or after ShardedDDP or DistributedDataParallel wraps the model.
    process_group, options: see OSS.
    optim: builds the optimizer again, for classes that do not store their arguments: the class, or a functools.partial
        of it with the arguments that differ from its defaults.

    Raises ValueError on every rank for anything but a torch optimizer, for an OSS, for arguments that the optimizer
    does not store, and for state that does not fit; TypeError for unknown options.
    """
    with alike([Comm(process_group)], "the optimizers given to OSS.from_optimizer") as lines:
        refuse_unfit(optimizer, sharded, rebuilds=optim is None)
        state.refuse_ownerless(optimizer)
        states = states_of(optimizer)
        lines.append(f"optimizer {type(optimizer).__name__} with state of {len(states)} parameters")
    kept = arguments(optimizer)[0] if optim is None else {}
    built = sharded(optimizer.param_groups, optim or type(optimizer), process_group, **options, **kept)
    if states:
        state.load(built.stepped_shards, {"state": states, "param_groups": state.numbered_groups(built.stepped_shards)})
    for before, now in zip(optimizer.param_groups, built.param_groups, strict=True):
        before.update(now)
    built.param_groups = optimizer.param_groups
    optimizer.state.clear()
    return built


def refuse_unfit(optimizer: object, sharded: Any, *, rebuilds: bool = True) -> None:
    """Raises ValueError for what no OSS can be built from.

    sharded: OSS. rebuilds: from the arguments that the optimizer stores.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"OSS.from_optimizer was given a {type(optimizer).__name__}. Pass a torch.optim.Optimizer.")
    if optimizer in _given:
        raise ValueError(
            f"the {type(optimizer).__name__} was given to OSS.from_optimizer, or to zero.setup, before, as in a "
            "notebook whose cell runs again, and has no state any more. Build it again, of the module's parameters."
        )
    if isinstance(optimizer, sharded):
        raise ValueError("OSS.from_optimizer was given an OSS, which shards its state already. Use it as it is.")
    missing = arguments(optimizer)[1] if rebuilds else []
    if not missing:
        return
    name = called(type(optimizer))
    raise ValueError(
        f"{name} does not keep what it was built with: {', '.join(missing)} is neither in its defaults nor an "
        f"attribute. Pass zero.setup or OSS the class and its arguments; or pass OSS.from_optimizer optim={name}, or a "
        "functools.partial of it with the arguments that are not its defaults."
    )


def arguments(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """The arguments that the optimizer was built with and stores, and the names of those that it does not store."""
    names, held = [*argument_names(type(optimizer))], {**vars(optimizer), **optimizer.defaults}
    return {name: held[name] for name in names if name in held}, [name for name in names if name not in held]


def states_of(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The state by number of the parameter, as state_dict() has it before hooks."""
    params = enumerate(params_of(optimizer))
    # `get`: the state is a defaultdict, in which `[]` would make an entry for each parameter.
    return {number: optimizer.state[param] for number, param in params if optimizer.state.get(param)}


def refuse_uncut(optimizer: Optimizer) -> None:
    """Raises ValueError for state that cannot be cut with its parameter."""
    params = params_of(optimizer)
    for number, of_one in states_of(optimizer).items():
        for key, leaf in leaves.opened(of_one).items():
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape != params[number].shape:
                raise ValueError(
                    f"the {type(optimizer).__name__} has for its parameter {number}, of shape "
                    f"{list(params[number].shape)}, the state {leaves.entry_of(key)!r} of shape {list(leaf.shape)}, "
                    "which cannot be cut between ranks with the parameter. Pass partition='whole', or clear the state."
                )


def refuse_use(optimizer: Optimizer) -> None:
    """Has an optimizer that was given to an OSS raise where it would step or save by itself."""
    _given.add(optimizer)
    call_stepped(optimizer)  # its schedulers look for it
    optimizer.register_step_pre_hook(partial(_refuse, "would step full parameters on each rank by itself", "Step"))
    optimizer.register_state_dict_pre_hook(partial(_refuse, "has no state any more", "Save the state of"))
    optimizer.register_load_state_dict_pre_hook(partial(_refuse, "has no state any more", "Load into"))


def _refuse(why: str, remedy: str, optimizer: Optimizer, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"this {type(optimizer).__name__} was given to OSS.from_optimizer, or to zero.setup, and {why}. {remedy} the "
        "OSS that it returned."
    )
