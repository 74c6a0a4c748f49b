"""Optimizer state: this rank's shards, and the full state in the plain optimizer's format.

The state tensors of a cut parameter are cut with it (`ParamShard`), their lists and tuples item by item (`leaves`).
Master weights are an entry of the state, "master", with the values for the next step (`settled`).

    full   {"state": {number of the parameter: {key: tensor or value}}, "param_groups": [... "params": [numbers]]}
    shard  the same with this rank's shards for tensors; "zero_shard" in each group says which (shard_mark.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.comm import COLLECTION
from zero.measure import param_groups
from zero.measure.param_groups import params_of
from zero.shards.masters import settled
from zero.shards.sharded_parameter import plain_state
from zero.state import leaves
from zero.state.own_dtypes import keep_dtypes
from zero.state.param_shard import ParamShard
from zero.state.shard_mark import mark, marks_of
from zero.state.stepped import SteppedShards
from zero.tensor_parallel import parts


def consolidate(optimizer: SteppedShards, to: int | None, *, settle: bool = True) -> dict[str, Any] | None:
    """Collective. The full state on rank `to` of the group (None: on every rank), None elsewhere.

    settle: master weights have the values for the next step; otherwise their own, whatever the parameters hold.

    Shards are received directly in the full tensors; a rank that only sends needs no memory for these.
    Raises ValueError on every rank if `to` is no rank of the group, or if shards of the state cannot be joined.
    """
    comm = optimizer.comm
    refuse_no_rank(to, comm.world)
    if comm.world == 1:
        return shard_of(optimizer, settle=settle)
    own = {owned: leaves.opened(_state_of(optimizer, owned, settle)) for owned in _shards_of(optimizer, comm.rank)}
    described = [json.loads(text) for text in comm.all_gather_text(_described(optimizer, own))]  # by rank
    recipient = to is None or to == comm.rank
    full: dict[int, dict[str, Any]] = {}
    transfers: dict[str, list[tuple[int, Tensor | None]]] = {}  # by type of device: some groups may be offloaded
    devices: dict[str, torch.device] = {}
    all_owned = [(owned, described[owned.owner].get(str(owned.number), {})) for owned in _shards_of(optimizer)]
    for owned, entries in all_owned:
        state, device = full.setdefault(owned.number, {}), optimizer.part(owned.param).device
        for key, entry in entries.items():
            shape = _full_shape(owned, key, entry)
            if key in state and shape is None:
                continue  # the same for all shards of this parameter: the first one counts
            if key not in state:
                state[key] = _room(entry, owned, shape, device) if recipient else None
            if "shape" not in entry:
                continue
            tensor = (state[key].view(-1) if shape is None else owned.slot(state[key])) if recipient else None
            if owned in own:
                source = own[owned][key].detach().to(device).contiguous().view(-1)
                tensor = source if tensor is None else tensor.copy_(source)
            transfers.setdefault(device.type, []).append((owned.owner, tensor))
            devices[device.type] = device
    for kind, of_kind in transfers.items():
        comm.collect(of_kind, to, devices[kind])
    if not recipient:
        return None
    states = {number: leaves.closed(found) for number, found in full.items()}
    states |= {number: deepcopy(optimizer.optim.state.get(param, {})) for number, param in _unsharded(optimizer)}
    return _state_dict(optimizer, states)


def refuse_no_rank(to: int | None, ranks: int) -> None:
    """Raises ValueError if `to` is neither a rank nor None."""
    if to is not None and not (type(to) is int and 0 <= to < ranks):
        raise ValueError(f"to={to!r} is no rank of the group of {ranks}: choose 0 to {ranks - 1}, or None for all.")


def _state_dict(optimizer: SteppedShards, states: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """states: by number of the parameter."""
    state = {number: state for number, state in sorted(states.items()) if state}
    return {"state": state, "param_groups": numbered_groups(optimizer)}


def _full_shape(owned: ParamShard, key: str, entry: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of the full tensor of a state entry; None if the entry is not cut."""
    if not owned.cut or "shape" not in entry:
        return None
    if owned.shape == (*entry["shape"],):
        return owned.full_shape
    raise ValueError(
        f"the state {leaves.entry_of(key)!r} of {owned.name} has the shape {entry['shape']}, neither the shard's nor a "
        "single value's: only the optimizer knows how shards of it make up a full tensor. Save each rank's own "
        "state_dict(), or build OSS with partition='whole'."
    )


def shard_of(optimizer: SteppedShards, *, settle: bool = True) -> dict[str, Any]:
    """This rank's shard of the state, without communication. If there is one rank, it is full and has no mark."""
    comm = optimizer.comm
    states = {owned.number: _state_of(optimizer, owned, settle) for owned in _shards_of(optimizer, comm.rank)}
    states |= {number: dict(optimizer.optim.state.get(param, {})) for number, param in _unsharded(optimizer)}
    found = _state_dict(optimizer, states)
    if comm.world > 1:
        mark(found, fingerprint(optimizer))
    return found


def load(optimizer: SteppedShards, state_dict: dict[str, Any]) -> None:
    """Loads a full state or this rank's own shard. Raises ValueError, and changes nothing, if it does not fit."""
    hand_over(optimizer, *own_shard(optimizer, state_dict))


def own_shard(
    optimizer: SteppedShards, state_dict: dict[str, Any]
) -> tuple[dict[nn.Parameter, dict[str, Any]], list[dict[str, Any]]]:
    """Returns this rank's shard of a full state, or a copy of its own, by `part(param)`, and the groups' options.
    Raises ValueError if the state does not fit."""
    states, is_shard = fitting(optimizer, state_dict), bool(marks_of(state_dict))
    return cut(optimizer, states.items(), is_shard=is_shard), state_dict["param_groups"]


def fitting(optimizer: SteppedShards, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns states by number of the parameter. Raises ValueError if they are another rank's or of another model."""
    groups = state_dict["param_groups"]
    found, expected = ([len(group["params"]) for group in all_of] for all_of in (groups, optimizer.param_groups))
    if found != expected:
        raise ValueError(
            f"the state has parameter groups of {found} parameters, the optimizer has {expected}. "
            "Build OSS from the same parameters, in the same groups, as the optimizer that was saved."
        )
    refuse_other_shard(optimizer, marks_of(state_dict))
    keys = [key for group in groups for key in group["params"]]
    if unknown := [*(state_dict["state"].keys() - {*keys})]:
        raise ValueError(
            f"the state has entries under {unknown[0]!r}, which is none of the parameters of its groups "
            f"({', '.join(map(repr, keys[:3]))}, ...). Load a state_dict() as the optimizer returned it."
        )
    states = {number: state_dict["state"][key] for number, key in enumerate(keys) if key in state_dict["state"]}
    if not marks_of(state_dict):
        _refuse_other_shapes(optimizer, states)
    return states


def cut(
    optimizer: SteppedShards, states: Iterable[tuple[int, dict[str, Any]]], *, is_shard: bool = False
) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns copies of this rank's shards of states, by `part(param)`. is_shard: they are its shards already."""
    own = {owned.number: owned for owned in _shards_of(optimizer, optimizer.comm.rank)}
    unsharded, taken = dict(_unsharded(optimizer)), {}
    for number, state in states:
        if owned := own.get(number):
            values = {key: owned.taken_from(leaf, is_shard=is_shard) for key, leaf in leaves.opened(state).items()}
            taken[optimizer.part(owned.param)] = leaves.closed(values)
        elif number in unsharded:
            taken[unsharded[number]] = deepcopy(state)
    return taken


def refuse_other_shard(
    optimizer: SteppedShards,
    marks: set[str],
    remedy: str = "Call consolidate_state_dict() before state_dict() to save what loads anywhere.",
) -> None:
    """Raises ValueError for the shard of another rank or layout. marks: of the state; none if it is full."""
    own = fingerprint(optimizer) if optimizer.shard_groups else "an optimizer of full parameters"
    if marks and own not in marks:
        raise ValueError(f"the state is one rank's shard ({', '.join(sorted(marks))}), but this is {own}. {remedy}")


def _refuse_other_shapes(optimizer: SteppedShards, states: dict[int, dict[str, Any]]) -> None:
    """Raises ValueError on every rank alike. Where no parameter is cut, state may have any shape."""
    all_owned = [*_shards_of(optimizer)]
    cuts = any(owned.cut for owned in all_owned) if optimizer.cuts is None else optimizer.cuts
    for owned in all_owned if cuts else ():
        for key, leaf in leaves.opened(states.get(owned.number, {})).items():
            cuttable = isinstance(leaf, Tensor) and leaf.dim() > 0
            if cuttable and leaf.shape != owned.full_shape:
                raise ValueError(
                    f"the state of {owned.name} has {leaves.entry_of(key)!r} of shape {list(leaf.shape)}, but the "
                    f"parameter has {list(owned.full_shape)}, and is cut between ranks. Load it into the same model, "
                    "or build OSS with partition='whole'."
                )


def hand_over(
    optimizer: SteppedShards, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Loads this rank's shards of a state, by `part(param)`, and the options of the groups."""
    masters = {
        shard: state.pop("master") for shard, state in taken.items() if optimizer.keeps_masters and "master" in state
    }
    options = [deepcopy(param_groups.options(group)) for group in groups]
    restore(optimizer.optim, taken, options)
    for option, group in zip(options, optimizer.param_groups, strict=True):
        group.update(option)
    with torch.no_grad():
        for shard, master in masters.items():
            shard.copy_(master)
    optimizer.loaded()


def restore(optimizer: Optimizer, taken: Mapping[Any, dict[str, Any]], options: Sequence[dict[str, Any]]) -> None:
    """Loads a state by parameters, and the groups' options, into a plain optimizer by its own `load_state_dict`, which
    converts device and dtype of the entries; see own_dtypes."""
    state_dict = numbered(optimizer, taken, options)
    optimizer.load_state_dict({**state_dict, param_groups.SHARD_MARK: OWN})
    keep_dtypes(optimizer, state_dict)


OWN = "own"
"""The mark of a state that is known to be of the optimizer's own shard, and is not compared."""


def numbered(
    optimizer: Optimizer, taken: Mapping[Any, dict[str, Any]], options: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Converts a state by parameters to the format of state_dict()."""
    numbers = {param: number for number, param in enumerate(params_of(optimizer))}
    return {
        "state": {numbers[param]: state for param, state in taken.items()},
        "param_groups": [
            {**option, "params": [numbers[param] for param in group["params"]]}
            for option, group in zip(options, optimizer.param_groups, strict=True)
        ],
    }


def _shards_of(optimizer: SteppedShards, rank: int | None = None) -> Iterator[ParamShard]:
    """Yields the shards of all ranks (or of `rank`), in the same order on all ranks."""
    numbers = {param: number for number, param in enumerate(params_of(optimizer))}
    for group in optimizer.shard_groups:
        for owner in range(group.layout.world) if rank is None else [rank]:
            for span in group.layout.spans(owner):
                number = numbers.get(group.params[span.index])
                if number is not None:  # otherwise another optimizer has it
                    yield ParamShard(number, group, span.index, owner, span)


def _unsharded(optimizer: SteppedShards) -> Iterator[tuple[int, nn.Parameter]]:
    """Yields the parameters in no shard group, with their numbers."""
    sharded = {param for group in optimizer.shard_groups for param in group.params}
    yield from ((number, param) for number, param in enumerate(params_of(optimizer)) if param not in sharded)


def _described(optimizer: SteppedShards, own: dict[ParamShard, dict[str, Any]]) -> str:
    """Descriptions of this rank's leaves as JSON: {number of the parameter: {key of the leaf: description}}.

    Raises ValueError on every rank if the state of any cannot be described, or has tensors whose class would be lost.
    """
    described, problem = {}, None
    try:
        for owned, state in own.items():
            described[owned.number] = leaves.all_described(state, owned.name)
        for number, param in _unsharded(optimizer):
            state = leaves.opened(dict(optimizer.optim.state.get(param, {})))
            leaves.all_described(
                {key: leaf for key, leaf in state.items() if leaves.wraps(leaf)}, f"parameter {number}"
            )
    except ValueError as error:
        problem = (
            f"{error}: in a consolidated state it would come out as another. Save each rank's own state_dict() "
            "instead, which loads into the same model on as many ranks."
        )
    optimizer.comm.compare("the states to consolidate", [], problem, COLLECTION)
    return json.dumps(described)


def _state_of(optimizer: SteppedShards, owned: ParamShard, settle: bool) -> dict[str, Any]:
    shard = optimizer.part(owned.param)
    state = plain_state(optimizer.optim.state.get(shard, {}))
    if owned.group.master is not None:
        held = owned.group.shard_views[owned.index]
        state["master"] = settled(shard.detach(), held) if settle else shard.detach()
    return state


def _room(entry: dict[str, Any], owned: ParamShard, shape: tuple[int, ...] | None, device: torch.device) -> Any:
    """The leaf itself if it is no tensor with dimensions, else an empty tensor that its shards are received in."""
    if "shape" not in entry:
        return leaves.value_of(entry)
    dtype = leaves.dtype_of(entry)
    if shape == owned.full_shape:
        return torch.empty_strided(shape, owned.group.shapes.strides[owned.index], dtype=dtype, device=device)
    return torch.empty(entry["shape"] if shape is None else shape, dtype=dtype, device=device)


def numbered_groups(optimizer: SteppedShards) -> list[dict[str, Any]]:
    """The optimizer's current groups, with numbers for parameters."""
    numbers, groups = count(), []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", param_groups.SHARD_MARK)}
        groups.append({**deepcopy(options), "params": [next(numbers) for _ in group["params"]]})
    return groups


def fingerprint(optimizer: SteppedShards) -> str:
    """The mark of this rank's shard: rank, world size and a digest of the layout."""
    numbers = {param: number for number, param in enumerate(params_of(optimizer))}
    laid_out = [
        (group.layout.bounds, [numbers.get(param) for param in group.params], group.shapes.full)
        for group in optimizer.shard_groups
    ]
    layout = hashlib.sha256(json.dumps(laid_out).encode()).hexdigest()[:12]
    others = parts.ranks(params_of(optimizer))
    part = "" if others is None else f", part {others.rank} of {others.world}"
    return f"rank {optimizer.comm.rank} of {optimizer.comm.world}, layout {layout}{part}"
