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
from torch import Tensor, nn

from zero.comm import COLLECTION
from zero.comm.together import alike
from zero.measure.param_groups import params_of
from zero.shards.layout import runs
from zero.state import leaves
from zero.state.optimizer_state import Leaf, numbered_groups, shards_of, state_of, unsharded
from zero.state.stepped import ParamShard, SteppedShards
from zero.tensor_parallel import parts

AT_ONCE = 1 << 24
"""Bytes of parameters that are in no shard group, in streams."""


def consolidate(
    optimizer: SteppedShards, to: int | None, device: torch.device | str | None = "cpu", *, settle: bool = True
) -> dict[str, Any] | None:
    """Collective. The full state in the plain optimizer's format on rank `to` (None: on every rank), None elsewhere.

    device: of its tensors; None for that of the shards. See `gathered`.
    """
    found: dict[int, dict[str, Any]] = {}
    for batch in gathered(optimizer, to, device, settle=settle):
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
    described = [json.loads(text) for text in comm.all_gather_text(_described(optimizer, own))]  # by rank
    for _, of_group in groupby(shards_of(optimizer), key=lambda owned: owned.group):
        entries = [(owned, described[owned.owner].get(str(owned.number), {})) for owned in of_group]
        keys = dict.fromkeys(key for _, of_owner in entries for key in of_owner)
        _refuse_partial(entries, keys)
        for key in keys:
            owners = [(owned, of_owner[key]) for owned, of_owner in entries if key in of_owner]
            # In no variable, which would keep it while the next entry is gathered.
            yield _collected(optimizer, key, owners, own, to, device) if takes_part else []
    for others in _unsharded_runs(optimizer):
        states = {number: leaves.opened(dict(optimizer.optim.state.get(param, {}))) for number, param in others}
        for key in dict.fromkeys(key for state in states.values() for key in state):
            having = [(number, state[key]) for number, state in states.items() if key in state]
            copied = having if takes_part and receives(optimizer, to) else []
            yield [(number, key, leaves.copied_to(leaf, device)) for number, leaf in copied]


def _unsharded_runs(optimizer: SteppedShards) -> list[list[tuple[int, nn.Parameter]]]:
    """The parameters in no shard group, with their numbers, in runs whose state is sent or copied at once."""
    others = [*unsharded(optimizer)]
    return [[others[index] for index in run] for run in runs([param.nbytes for _, param in others], AT_ONCE)]


def _collected(
    optimizer: SteppedShards,
    key: str,
    having: Iterable[tuple[ParamShard, dict[str, Any]]],
    own: dict[ParamShard, dict[str, Any]],
    to: int | None,
    device: torch.device | str | None,
) -> list[Leaf]:
    """Collective. Returns one leaf of all parameters of a group. having: the shards whose owners have it, and what they
    say of it."""
    comm, received = optimizer.comm, to is None or to == optimizer.comm.rank
    found: dict[ParamShard, Any] = {}
    numbers: dict[int, ParamShard] = {}
    transfers: list[tuple[int, int, Tensor | None]] = []
    here = torch.device("cpu")
    for owned, entry in having:
        shape, here = _full_shape(owned, key, entry), optimizer.part(owned.param).device
        first = numbers.setdefault(owned.number, owned)
        if first is not owned and shape is None:
            continue  # the same for all shards of this parameter: the first one counts
        if first is owned:
            found[first] = _room(entry, owned, shape, here) if received else None
        if "shape" in entry:
            into = (found[first].view(-1) if shape is None else owned.slot(found[first])) if received else None
            if owned in own:
                source = own[owned][key].detach().to(here).contiguous().view(-1)
                into = source if into is None else into.copy_(source)
            nbytes = math.prod(entry["shape"]) * leaves.dtype_of(entry).itemsize
            transfers.append((owned.owner, nbytes, into))
    if transfers:
        comm.collect(transfers, to, here)
    if not received:
        return []
    whole = [(owned.number, key, leaves.moved(_whole(owned, key, value), device)) for owned, value in found.items()]
    return whole if receives(optimizer, to) else []


def _refuse_partial(entries: Iterable[tuple[ParamShard, dict[str, Any]]], keys: Iterable[str]) -> None:
    """Raises ValueError, on every rank alike, if only some owners of a cut parameter have an entry."""
    having: dict[tuple[int, str], bool] = {}
    for owned, of_owner in entries:
        for key in keys if owned.cut else ():
            if having.setdefault((owned.number, key), key in of_owner) != (key in of_owner):
                raise ValueError(
                    f"the state {leaves.entry_of(key)!r} of {owned.name} is there on some of the ranks alone that have "
                    "shards of the parameter: its optimizer makes state by the values of gradients. Shard it with "
                    "partition='whole'."
                )


def _whole(owned: ParamShard, key: str, value: Any) -> Any:
    """Collective among ranks that have parts of the same tensor: an entry in the part's shape is a part as well."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape == owned.full_shape:
        return parts.whole(owned.param, value)
    if parts.others(owned.param) is None:
        return value
    raise ValueError(
        f"the state {leaves.entry_of(key)!r} of {owned.name} has the shape {list(value.shape)}, but this rank's part "
        f"of the parameter has {list(owned.full_shape)}: only the optimizer knows how such parts make up a whole. Save "
        "each rank's own state_dict()."
    )


def _full_shape(owned: ParamShard, key: str, entry: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of the full tensor of a state entry; None if the entry is not cut."""
    if not owned.cut or "shape" not in entry or (math.prod(entry["shape"]) == 1 and owned.shape != (*entry["shape"],)):
        return None
    if owned.shape == (*entry["shape"],):
        return owned.full_shape
    raise ValueError(
        f"the state {leaves.entry_of(key)!r} of {owned.name} has the shape {entry['shape']}, neither the shard's nor a "
        "single value's: only the optimizer knows how shards of it make up a full tensor. Save each rank's own "
        "state_dict(), or build OSS with partition='whole'."
    )


def _room(entry: dict[str, Any], owned: ParamShard, shape: tuple[int, ...] | None, device: torch.device) -> Any:
    """The leaf itself if it is no tensor with dimensions, else an empty tensor that its shards are received in."""
    if "shape" not in entry:
        return leaves.value_of(entry)
    dtype = leaves.dtype_of(entry)
    if shape == owned.full_shape:
        return torch.empty_strided(shape, owned.group.shapes.strides[owned.index], dtype=dtype, device=device)
    return torch.empty(entry["shape"] if shape is None else shape, dtype=dtype, device=device)


def _described(optimizer: SteppedShards, own: dict[ParamShard, dict[str, Any]]) -> str:
    """Descriptions of this rank's leaves as JSON: {number of the parameter: {key of the leaf: description}}.

    Raises ValueError on every rank if the state of any cannot be described, or has tensors whose class would be lost.
    """
    described = {}
    with alike([optimizer.comm], "the states to consolidate", COLLECTION):
        try:
            for owned, state in own.items():
                described[owned.number] = leaves.all_described(state, owned.name)
            for number, param in unsharded(optimizer):
                state = leaves.opened(dict(optimizer.optim.state.get(param, {})))
                wrapping = {key: leaf for key, leaf in state.items() if leaves.wraps(leaf)}
                leaves.all_described(wrapping, f"parameter {number}")
        except ValueError as error:
            raise ValueError(
                f"{error}: in a consolidated state it would come out as another. Save each rank's own state_dict() "
                "instead, which loads into the same model on as many ranks."
            ) from None
    return json.dumps(described)
