"""Weights and optimizer state that were given to the first rank alone, such as what it has read from a file.

load_weights   the first rank loads them into full parameters in the host's memory, by the module's own
               load_state_dict(); then they are sent unit by unit: another rank holds one full unit at most
load_state     is sent parameter by parameter: each rank receives the full tensors of one and keeps its shard
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zero.comm import Comm
from zero.fsdp.model import Model, models_of
from zero.fsdp.unit import Unit
from zero.measure import param_groups
from zero.measure.param_groups import params_of
from zero.shards.parts import parts_here
from zero.state import leaves
from zero.state.optimizer_state import cut, fitting, hand_over
from zero.state.stepped_shards import Sharded, groups_of
from zero.state.weights import summoned


def first_alone(comms: Sequence[Comm], what: str, given: object, params: Iterable[Tensor]) -> bool:
    """Collective. Returns whether the first of several ranks alone was given something.

    comms: the groups of ranks, one after another, as Placement.all_groups. Raises ValueError on every rank if it is
    neither the first nor all, and if it is the first, but ranks have other parts of the parameters.
    """
    flags = "1" if given else "0"
    for comm in comms:
        flags = "".join(comm.all_gather_text(flags))
    having = [rank for rank, flag in enumerate(flags) if flag == "1"]
    if having not in ([0], [*range(len(flags))]):
        who = f"only {', '.join(f'rank {rank}' for rank in having)} of {len(flags)}" if having else "no rank"
        raise ValueError(f"{what}: {who} was given any. Pass them on every rank, or on rank 0 and None elsewhere.")
    alone = having == [0] and len(flags) > 1
    if alone and parts_here().ranks(params) is not None:
        raise ValueError(
            f"{what}: rank 0 alone was given them, but the model is tensor parallel. Pass them on every rank."
        )
    return alone


def _is_first(comms: Sequence[Comm]) -> bool:
    return all(comm.rank == 0 for comm in comms)


def _from_first(comms: Sequence[Comm], make: Callable[[], Any]) -> Any:
    """Collective. Returns the JSON value that `make` returns on the first rank; if it raises there, raises ValueError
    on every rank."""
    text = ""
    if _is_first(comms):
        try:
            text = json.dumps({"value": make()})
        except Exception as error:  # from the user's modules or values: every rank must raise it
            text = json.dumps({"problem": str(error) or type(error).__name__})
    for comm in comms:
        text = comm.all_gather_text(text)[0]
    told = json.loads(text)
    if "problem" in told:
        raise ValueError(f"rank 0, which alone was given what is to be loaded: {told['problem']}")
    return told["value"]


def _broadcast(comms: Sequence[Comm], tensors: Sequence[Tensor]) -> None:
    for comm in comms:
        comm.broadcast(tensors)


# ------------------------------------------------------------------------------------------------------- weights


def load_weights(module: nn.Module, comms: Sequence[Comm], load: Callable[[], Any]) -> Any:
    """Collective. Returns what load_state_dict() does.

    load: calls the module's load_state_dict(); is called on the first rank. Raises ValueError on every rank if it
    raises. torch then has loaded what fits, which stays at stages 0 to 2; sharded parameters stay as they were.
    """
    sharded = models_of(module)
    held = {param for _, units in sharded for unit in units for param in unit.params}
    others = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor not in held]
    with ExitStack() as stack:
        for model, units in sharded:
            stack.enter_context(summoned(model, units, rank0_only=True, offload_to_cpu=True))
        try:
            missing, unexpected = _from_first(comms, load)
        finally:
            _broadcast(comms, others)
        for model, units in sharded:
            for unit in units:
                _send(model, unit, first=_is_first(comms))
    names = nn.Module().load_state_dict({})
    return names._replace(missing_keys=missing, unexpected_keys=unexpected)


def _send(model: Model, unit: Unit, *, first: bool) -> None:
    """Collective. Gives every rank its shards of a unit whose parameters are summoned on the first rank."""
    params = [param for group in unit.groups for param in group.params]
    loaded = [param.detach() for param in params] if first else []
    for group in unit.groups:
        group.dismiss(keep=False)
    with summoned(model, [unit], writeback=True), torch.no_grad():
        for param, value in zip(params, loaded, strict=False):
            param.copy_(value)
        model.placement.broadcast(params)


# ----------------------------------------------------------------------------------------------- optimizer state


def load_state(optimizer: Sharded, comms: Sequence[Comm], state_dict: dict[str, Any]) -> None:
    """Collective. Loads a full state that the first rank was given; other ranks may pass anything.

    Raises ValueError on every rank, and changes nothing, if the state does not fit.
    """
    told = _from_first(comms, lambda: _described(state_dict))
    like = {key: _without_data(entries) for key, entries in told["state"]}
    groups = [leaves.closed(_without_data(entries)) for entries in told["param_groups"]]
    fitting(optimizer, {"state": {key: leaves.closed(state) for key, state in like.items()}, "param_groups": groups})
    sharded = groups_of(optimizer)
    device = sharded[0].full.device if sharded else params_of(optimizer)[0].device
    keys = [key for group in groups for key in group["params"]]

    def received() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, key in enumerate(keys):
            if key not in like:
                continue
            given = leaves.opened(state_dict["state"][key]) if _is_first(comms) else like[key]
            tensors = {
                name: given[name].to(device)
                if _is_first(comms)
                else torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
                for name, leaf in like[key].items()
                if isinstance(leaf, Tensor) and leaf.dim()
            }
            _broadcast(comms, [*tensors.values()])
            yield number, leaves.closed({**like[key], **tensors})

    hand_over(optimizer, cut(optimizer, received()), groups)


def _described(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state as JSON, tensors with dimensions as their shapes and dtypes. Raises ValueError for a shard, and
    for what cannot be sent."""
    groups = state_dict["param_groups"]
    if any(param_groups.SHARD_MARK in one for one in [state_dict, *groups]):
        raise ValueError("the state is one rank's shard. Save what zero.full_optimizer_state_dict() returns.")
    states = [
        (key, leaves.all_described(leaves.opened(state), f"parameter {key}"))
        for key, state in state_dict["state"].items()
    ]
    options = [leaves.all_described(leaves.opened(group), f"group {i}", "option") for i, group in enumerate(groups)]
    return {"state": states, "param_groups": options}


def _without_data(entries: dict[str, Any]) -> dict[str, Any]:
    """Returns leaves as they were described; tensors with dimensions need no memory."""
    return {
        key: torch.empty((), dtype=leaves.dtype_of(entry), device="cpu").expand(entry["shape"])
        if "shape" in entry
        else leaves.value_of(entry)
        for key, entry in entries.items()
    }
