"""The full state of an optimizer, gathered shard group by shard group.

A rank that receives it holds, beside what it was given, the tensors of one entry of one group: as much as one unit.
They are received on the device of the shards, and moved from there; a rank that only sends needs no memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from zero._torch.tensors import wraps_others
from zero.comm import COLLECTION
from zero.comm.together import alike
from zero.measure.param_groups import params_of
from zero.shards.layout import runs
from zero.state import leaves
from zero.state.optimizer_state import (
    Leaf,
    numbered_groups,
    refuse_ownerless,
    shards_of,
    state_held,
    state_of,
    unsharded,
)
from zero.state.stepped import ParamShard, SteppedShards
from zero.tensor_parallel import parts

AT_ONCE = 1 << 24
"""Bytes of parameters that are in no shard group, in streams."""


def consolidate(
    optimizer: SteppedShards, to: int | None, device: torch.device | str | None = "cpu"
) -> dict[str, Any] | None:
    """Collective. The full state in the plain optimizer's format on rank `to` (None: on every rank), None elsewhere.
    device: of its tensors; None for that of the shards."""
    found: dict[int, dict[str, Any]] = {}
    for batch in gathered(optimizer, to, device):
        for number, key, leaf in batch:
            found.setdefault(number, {})[key] = leaf
    if not receives(optimizer, to):
        return None
    state = {number: leaves.closed(found[number]) for number in sorted(found)}
    return {"state": state, "param_groups": numbered_groups(optimizer)}


def receives(optimizer: SteppedShards, to: int | None) -> bool:
    """Whether this rank receives the full state: of ranks that have parts of the same tensors, the first does."""
    return to is None or (to == optimizer.comm.rank and parts.is_first(params_of(optimizer)))


def refuse_no_rank(to: int | None, ranks: int) -> None:
    """Raises ValueError if `to` is neither a rank nor None."""
    if to is not None and not (type(to) is int and 0 <= to < ranks):
        raise ValueError(f"to={to!r} is no rank of the group of {ranks}: choose 0 to {ranks - 1}, or None for all.")


def gathered(
    optimizer: SteppedShards,
    to: int | None,
    device: torch.device | str | None,
    *,
    settle: bool = True,
    takes_part: bool = True,
) -> Iterator[list[Leaf]]:
    """Collective. Yields copies of one entry after another of each shard group's state on rank `to` of the group (None:
    on every rank), and nothing in the lists of others; at last those of parameters that are not sharded, in runs.

    takes_part: False for replicas that have no rank which receives: as many lists, and nothing is sent.
    settle: master weights have the values for the next step; otherwise their own, whatever the parameters hold.

    Raises ValueError on every rank if `to` is no rank of the group, or if shards of the state cannot be joined.
    """
    comm = optimizer.comm
    refuse_no_rank(to, comm.world)
    own = {owned: leaves.opened(state_of(optimizer, owned, settle)) for owned in shards_of(optimizer, comm.rank)}
    others, nbytes = [], []
    for number, param in unsharded(optimizer):
        others.append((number, leaves.opened(state_held(optimizer.optim, param))))
        nbytes.append(param.nbytes)
    with alike([comm], "the states to consolidate", COLLECTION):
        refuse_ownerless(optimizer.optim)
        try:
            mine = {owned.number: leaves.all_described(state, owned.name) for owned, state in own.items()}
            for number, state in others:
                wrapping = {key: leaf for key, leaf in state.items() if wraps_others(leaf)}
                leaves.all_described(wrapping, f"parameter {number}")
        except ValueError as error:
            raise ValueError(
                f"{error}: in a consolidated state it would come out as another. Save each rank's own state_dict() "
                "instead, which loads into the same model on as many ranks."
            ) from None
    described = [json.loads(text) for text in comm.all_gather_text(json.dumps(mine))]  # by rank
    for _, of_group in groupby(shards_of(optimizer), key=lambda owned: owned.group):
        entries = [(owned, described[owned.owner].get(str(owned.number), {})) for owned in of_group]
        keys = dict.fromkeys(key for _, of_owner in entries for key in of_owner)
        having: dict[tuple[int, str], bool] = {}
        for owned, of_owner in entries:
            for key in keys if owned.cut else ():
                if having.setdefault((owned.number, key), key in of_owner) != (key in of_owner):
                    raise ValueError(
                        f"the state {leaves.entry_of(key)!r} of {owned.name} is there on some of the ranks alone that "
                        "have shards of the parameter: its optimizer makes state by the values of gradients. Shard it "
                        "with partition='whole'."
                    )
        for key in keys:
            owners = [(owned, of_owner[key]) for owned, of_owner in entries if key in of_owner]
            # In no variable, which would keep it while the next entry is gathered.
            yield _collected(optimizer, key, owners, own, to, device) if takes_part else []
    for run in runs(nbytes, AT_ONCE):
        states = [others[index] for index in run]
        for key in dict.fromkeys(key for _, state in states for key in state):
            copied = states if takes_part and receives(optimizer, to) else []
            yield [(number, key, leaves.copied(state[key], device)) for number, state in copied if key in state]


def _collected(
    optimizer: SteppedShards,
    key: str,
    having: Iterable[tuple[ParamShard, dict[str, Any]]],
    own: dict[ParamShard, dict[str, Any]],
    to: int | None,
    device: torch.device | str | None,
) -> list[Leaf]:
    """Collective, also among ranks that have parts of the same tensors. Returns one leaf of all parameters of a group.
    having: the shards whose owners have it, and what they say of it."""
    comm, received = optimizer.comm, to is None or to == optimizer.comm.rank
    found: dict[ParamShard, Any] = {}
    numbers: dict[int, ParamShard] = {}
    transfers: list[tuple[int, int, Tensor | None]] = []
    here = torch.device("cpu")
    for owned, entry in having:
        here, shape = optimizer.part(owned.param).device, (*entry.get("shape", ()),)
        is_cut = owned.cut and "shape" in entry and (math.prod(shape) != 1 or owned.shape == shape)
        if is_cut and owned.shape != shape:
            raise ValueError(
                f"the state {leaves.entry_of(key)!r} of {owned.name} has the shape {entry['shape']}, neither the "
                "shard's nor a single value's: only the optimizer knows how shards of it make up a full tensor. Save "
                "each rank's own state_dict(), or build OSS with partition='whole'."
            )
        first = numbers.setdefault(owned.number, owned)
        if first is not owned and not is_cut:
            continue  # the same for all shards of this parameter: the first one counts
        if first is owned:
            found[first] = _room(entry, owned, here) if received else None
        if "shape" in entry:
            of_elements = owned.shape == shape
            into = (owned.slot(found[first]) if of_elements else found[first].view(-1)) if received else None
            if owned in own:
                source = own[owned][key].detach().to(here)
                in_order = of_elements and not owned.cut  # else this rank's elements are flat, or there is no order
                source = owned.slot(source) if in_order else source.contiguous().view(-1)
                into = source if into is None else into.copy_(source)
            nbytes = math.prod(entry["shape"]) * leaves.dtype_of(entry).itemsize
            transfers.append((owned.owner, nbytes, into))
    if transfers:
        comm.collect(transfers, to, here)
    whole = []
    for owned, value in found.items() if received else ():
        if isinstance(value, Tensor) and value.dim():  # in the part's shape it is a part as well
            if value.shape == owned.full_shape:
                value = parts.whole(owned.param, value)
            elif parts.others(owned.param) is not None:
                raise ValueError(
                    f"the state {leaves.entry_of(key)!r} of {owned.name} has the shape {list(value.shape)}, but this "
                    f"rank's part of the parameter has {list(owned.full_shape)}: only the optimizer knows how such "
                    "parts make up a whole. Save each rank's own state_dict()."
                )
        moved = value if device is None or not isinstance(value, Tensor) else value.to(device)
        whole.append((owned.number, key, moved))
    return whole if receives(optimizer, to) else []


def _room(entry: dict[str, Any], owned: ParamShard, device: torch.device) -> Any:
    """The leaf itself if it is no tensor with dimensions, else an empty tensor that its shards are received in. One of
    the parameter's shape has its order in memory, by which alone fused optimizers of torch go."""
    if "shape" not in entry or (*entry["shape"],) != owned.shape:
        return leaves.value_of(entry, device)
    strides = owned.group.shapes.strides[owned.index]
    return torch.empty_strided(owned.full_shape, strides, dtype=leaves.dtype_of(entry), device=device)
