"""An optimizer of full parameters that was built before: OSS.from_optimizer, an OSS that continues with its groups,
options, names, state and hooks; and what keeps an optimizer from being sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero._torch.optimizers import call_stepped, is_of_scheduler
from zero.comm import Comm
from zero.comm.together import alike
from zero.measure.param_groups import Alike, called, params_of
from zero.state import leaves
from zero.state import optimizer_state as state
from zero.state.stepped import refuse_retired, retire


def from_optimizer(
    sharded: Any,
    optimizer: Optimizer,
    process_group: torch.distributed.ProcessGroup | None,
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

    What else the optimizer has, as its constructor and its steps have left it, moves along: the OSS goes on from there.

    Raises ValueError on every rank for anything but a torch optimizer, for an OSS, for one that keeps tensors in
    attributes, and for state that does not fit; TypeError for unknown options.
    """
    with alike([Comm(process_group)], "the optimizers given to OSS.from_optimizer") as lines:
        refuse_unfit(optimizer, sharded)
        state.refuse_ownerless(optimizer)
        states = states_of(optimizer)
        lines.append(f"optimizer {type(optimizer).__name__} with state of {len(states)} parameters")
    built = sharded(optimizer.param_groups, Alike(optimizer, shares=True), process_group, **options)
    if states:
        state.load(built.stepped_shards, {"state": states, "param_groups": state.numbered_groups(built.stepped_shards)})
    for before, now in zip(optimizer.param_groups, built.param_groups, strict=True):
        before.update(now)
    built.param_groups = optimizer.param_groups
    optimizer.state.clear()
    return built


def refuse_unfit(optimizer: object, sharded: Any, *, moves: bool = True) -> None:
    """Raises ValueError for what no OSS can be built from. sharded: OSS. moves: False for one that goes on itself."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"OSS.from_optimizer was given a {type(optimizer).__name__}. Pass a torch.optim.Optimizer.")
    refuse_retired(optimizer, ValueError)
    if isinstance(optimizer, sharded):
        raise ValueError("OSS.from_optimizer was given an OSS, which shards its state already. Use it as it is.")
    if moves and (kept := Alike(optimizer).has_tensors) is not None:
        name = called(type(optimizer))
        raise ValueError(
            f"the {name} keeps tensors, or another optimizer, in its attribute {kept!r}, and OSS steps shards in place "
            f"of the parameters that these belong to. Pass zero.setup or OSS the class {name} and its arguments."
        )
    step = vars(optimizer).get("step") if moves else None
    if step is not None and not is_of_scheduler(step):
        raise ValueError(
            f"step() of the {type(optimizer).__name__} was replaced on the object, and OSS steps by its class. Do it "
            "in a subclass, or in a hook: optimizer.register_step_pre_hook."
        )


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
    call_stepped(optimizer)  # its schedulers look for it
    retire(
        optimizer,
        f"this {type(optimizer).__name__} was given to OSS.from_optimizer, or to zero.setup, before, and has no state "
        "any more. Use the OSS that it returned; in a notebook whose cell runs again, build another optimizer of the "
        "module's parameters.",
    )
