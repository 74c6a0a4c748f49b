"""Optimizer state that was given to the first rank alone, such as what it has read from a file. It is sent parameter by
parameter: each rank receives the full tensors of one and keeps its shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.comm import Comm
from zero.measure.param_groups import params_of
from zero.state import leaves
from zero.state.optimizer_state import cut, fitting, hand_over
from zero.state.shard_mark import marks_of
from zero.state.stepped import SteppedShards
from zero.tensor_parallel import parts


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
    if alone and parts.ranks(params) is not None:
        raise ValueError(
            f"{what}: rank 0 alone was given them, but the model is tensor parallel. Pass them on every rank."
        )
    return alone


def is_first_of(comms: Sequence[Comm]) -> bool:
    return all(comm.rank == 0 for comm in comms)


def from_first(comms: Sequence[Comm], make: Callable[[], Any]) -> Any:
    """Collective. Returns the JSON value that `make` returns on the first rank; if it raises there, raises ValueError
    on every rank."""
    text = ""
    if is_first_of(comms):
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


def broadcast(comms: Sequence[Comm], tensors: Sequence[Tensor]) -> None:
    for comm in comms:
        comm.broadcast(tensors)


def load_state(optimizer: SteppedShards, comms: Sequence[Comm], state_dict: dict[str, Any]) -> None:
    """Collective. Loads a full state that the first rank was given; other ranks may pass anything.

    Raises ValueError on every rank, and changes nothing, if the state does not fit.
    """
    told = from_first(comms, lambda: _described(state_dict))
    like = {key: _without_data(entries) for key, entries in told["state"]}
    groups = [leaves.closed(_without_data(entries)) for entries in told["param_groups"]]
    fitting(optimizer, {"state": {key: leaves.closed(state) for key, state in like.items()}, "param_groups": groups})
    sharded = optimizer.shard_groups
    device = sharded[0].full.device if sharded else params_of(optimizer)[0].device
    keys = [key for group in groups for key in group["params"]]

    def received() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, key in enumerate(keys):
            if key not in like:
                continue
            given = leaves.opened(state_dict["state"][key]) if is_first_of(comms) else like[key]
            tensors = {
                name: given[name].to(device)
                if is_first_of(comms)
                else torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
                for name, leaf in like[key].items()
                if isinstance(leaf, Tensor) and leaf.dim()
            }
            broadcast(comms, [*tensors.values()])
            yield number, leaves.closed({**like[key], **tensors})

    hand_over(optimizer, cut(optimizer, received()), groups)


def _described(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state as JSON, tensors with dimensions as their shapes and dtypes. Raises ValueError for a shard, and
    for what cannot be sent."""
    groups = state_dict["param_groups"]
    if marks_of(state_dict):
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
