"""Optimizer state: this rank's shards, and the full state in the plain optimizer's format.

Of a parameter that is cut, tensors in the state are cut with it; `ParamShard` says how. Of a parameter that lies whole
with one rank, every entry is taken as it is. Lists and tuples in the state are taken item by item (`leaves`).

A master of a shard is an entry like the others, called "master", as the next step takes it (`settled`); plain
optimizers carry it along.

    full   {"state": {number of the parameter: {key: tensor or value}}, "param_groups": [... "params": [numbers]]}
    shard  the same with this rank's shards for tensors; "zero_shard" says of which layout, so that it is not mistaken

An optimizer of the user's own (stage 3) writes its state_dict() itself. There each group has the mark, which so comes
along into whatever optimizer loads it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.measure import param_groups
from zero.oss import leaves
from zero.oss.masters import settled
from zero.oss.param_shard import ParamShard
from zero.oss.shard_group import ShardGroup


class Sharded(Protocol):
    """An optimizer of parameters that lie in shards, such as OSS.

    optim: the one that steps the shards of this rank.
    param_groups: the full parameters, by group.
    shard_groups: where they lie. What lies in none is unsharded, and the same, on every rank.
    granularity: elements of which cuts inside parameters are multiples, if the user said so.
    """

    @property
    def comm(self) -> Comm: ...
    @property
    def optim(self) -> Optimizer: ...
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def shard_groups(self) -> list[ShardGroup]: ...
    @property
    def granularity(self) -> int | None: ...
    @property
    def cuts_parameters(self) -> bool: ...
    @property
    def keeps_masters(self) -> bool: ...
    def part(self, param: nn.Parameter) -> nn.Parameter:
        """What of the parameter `optim` steps."""

    def master(self, flat: ShardGroup) -> Tensor | None:
        """This rank's shard of the group in another dtype, if shards are stepped so."""


def consolidate(optimizer: Sharded, to: int | None, *, settle: bool = True) -> dict[str, Any] | None:
    """Collective. The full state on rank `to` of the group (None: on every rank), None elsewhere.

    settle: masters as the next step takes them; otherwise as they are, whatever the parameters hold by now.

    OwnedShards travel straight into their place in the full tensors; a rank that only sends needs no memory for it.
    Raises ValueError, on every rank, where `to` is no rank of the group, or where state cannot be put together.
    """
    comm = optimizer.comm
    if to is not None and not 0 <= to < comm.world:
        raise ValueError(
            f"to={to} is no rank of the group of {comm.world}: choose 0 to {comm.world - 1}, or None for all."
        )
    if comm.world == 1:
        return shard_of(optimizer, as_full=True, settle=settle)
    described = [json.loads(text) for text in comm.all_gather_text(_told(optimizer, settle))]  # by rank
    recipient = to is None or to == comm.rank
    full: dict[int, dict[str, Any]] = {}
    transfers: list[tuple[int, Tensor | None]] = []
    all_owned = [(owned, described[owned.owner].get(str(owned.number), {})) for owned in _shards_of(optimizer)]
    rows = _count_rows(all_owned)
    for owned, entries in all_owned:
        state = full.setdefault(owned.number, {})
        own = leaves.opened(_state_of(optimizer, owned, settle)) if owned.owner == comm.rank else {}
        for key, entry in entries.items():
            shape = _full_shape(owned, key, entry, rows)
            if key in state and shape is None:
                continue  # the same for all shards of this parameter, and taken from the first
            if key not in state:
                state[key] = _room(entry, owned, shape, optimizer.part(owned.param).device) if recipient else None
            if "shape" not in entry:
                continue
            tensor = (state[key].view(-1) if shape is None else owned.slot(state[key])) if recipient else None
            if owned.owner == comm.rank:
                source = own[key].detach().contiguous().view(-1)
                tensor = source if tensor is None else tensor.copy_(source)
            transfers.append((owned.owner, tensor))
    comm.collect(transfers, to)
    if not recipient:
        return None
    states = {number: leaves.closed(found) for number, found in full.items()}
    states |= {number: deepcopy(optimizer.optim.state.get(param, {})) for number, param in _unsharded(optimizer)}
    return {
        "state": {number: state for number, state in sorted(states.items()) if state},
        "param_groups": numbered_groups(optimizer),
    }


def _count_rows(all_owned: list[tuple[ParamShard, dict[str, Any]]]) -> Counter[tuple[int, str]]:
    """How long the tensors of all shards of a parameter are together."""
    rows: Counter[tuple[int, str]] = Counter()
    for owned, entries in all_owned:
        for key, entry in entries.items():
            rows[owned.number, key] += entry["shape"][0] if "shape" in entry else 0
    return rows


def _full_shape(
    owned: ParamShard, key: str, entry: dict[str, Any], rows: Counter[tuple[int, str]]
) -> tuple[int, ...] | None:
    """The shape of the full tensor, of which this is a shard's; None if it is all there is."""
    if not owned.cut or "shape" not in entry:
        return None
    length, *rest = entry["shape"]
    if owned.shape == (length, *rest):
        return owned.full_shape
    own = owned.rows(rows[owned.number, key])
    if own is not None and own.stop - own.start == length:
        return (rows[owned.number, key], *rest)
    raise ValueError(
        f"the state {leaves.entry_of(key)!r} of {owned.name} has the shape {entry['shape']}, "
        "not the shard's, a single value's, or a row for each block of a divisor of the granularity "
        f"({owned.granularity}): only the optimizer knows how shards of it make up a full tensor. Save each rank's own "
        "state_dict(), or build OSS with partition='whole'."
    )


def shard_of(optimizer: Sharded, *, as_full: bool = False, settle: bool = True) -> dict[str, Any]:
    """This rank's shard, without communication. as_full: it is all there is, and needs no mark of a shard."""
    all_owned = {
        owned.number: _state_of(optimizer, owned, settle) for owned in _shards_of(optimizer, optimizer.comm.rank)
    }
    all_owned |= {number: dict(optimizer.optim.state.get(param, {})) for number, param in _unsharded(optimizer)}
    state = {number: state for number, state in sorted(all_owned.items()) if state}
    mark = {} if as_full else {param_groups.SHARD_MARK: fingerprint(optimizer)}
    return {"state": state, "param_groups": numbered_groups(optimizer), **mark}


def load(optimizer: Sharded, state_dict: dict[str, Any]) -> None:
    """Takes a full state or this rank's own shard. Raises ValueError, and changes nothing, where it does not fit."""
    hand_over(optimizer, *own_shard(optimizer, state_dict))


def own_shard(
    optimizer: Sharded, state_dict: dict[str, Any]
) -> tuple[dict[nn.Parameter, dict[str, Any]], list[dict[str, Any]]]:
    """What this rank takes of a full state or of its own shard: copies by `part(param)`, and the groups' options.

    Raises ValueError where the state does not fit.
    """
    groups = state_dict["param_groups"]
    found = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if found != expected:
        raise ValueError(
            f"the state has parameter groups of {found} parameters, the optimizer has {expected}. "
            "Build OSS from the same parameters, in the same groups, as the optimizer that was saved."
        )
    is_shard = param_groups.SHARD_MARK in state_dict
    refuse_other_shard(optimizer, state_dict.get(param_groups.SHARD_MARK))
    numbers = [number for group in groups for number in group["params"]]
    if not is_shard:
        _refuse_other_shapes(optimizer, state_dict["state"], numbers)
    taken: dict[nn.Parameter, dict[str, Any]] = {}
    for owned in _shards_of(optimizer, optimizer.comm.rank):
        state = state_dict["state"].get(numbers[owned.number])
        if state is not None:
            taken[optimizer.part(owned.param)] = {
                key: owned.taken_from(value, is_shard=is_shard) for key, value in state.items()
            }
    for number, param in _unsharded(optimizer):
        if numbers[number] in state_dict["state"]:
            taken[param] = deepcopy(state_dict["state"][numbers[number]])
    return taken, groups


def refuse_other_shard(
    optimizer: Sharded,
    mark: str | None,
    remedy: str = "Call consolidate_state_dict() before state_dict() to save what loads anywhere.",
) -> None:
    """mark: of the shard of a rank, None of a full state. Raises ValueError where that is another shard."""
    if mark is not None and mark != fingerprint(optimizer):
        raise ValueError(f"the state is one rank's shard ({mark}), but this is {fingerprint(optimizer)}. {remedy}")


def _refuse_other_shapes(optimizer: Sharded, states: dict[Any, dict[str, Any]], numbers: list[Any]) -> None:
    """On every rank, whatever it owns. Where parameters lie whole, an optimizer may keep what shapes it likes."""
    if not optimizer.cuts_parameters:
        return
    for owned in _shards_of(optimizer):
        for key, value in states.get(numbers[owned.number], {}).items():
            for leaf in leaves.opened({key: value}).values():
                if not isinstance(leaf, Tensor) or not leaf.dim():
                    continue
                if leaf.shape != owned.full_shape and owned.rows(len(leaf)) is None:
                    raise ValueError(
                        f"the state of {owned.name} has {key!r} of shape {list(leaf.shape)}, but the parameter has "
                        f"{list(owned.full_shape)}, and is cut between ranks. Load it into the same model, or build "
                        "OSS with partition='whole'."
                    )


def hand_over(optimizer: Sharded, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Takes this rank's shards of a state, by `part(param)`, and the options of the groups."""
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


def restore(optimizer: Optimizer, taken: Mapping[Any, dict[str, Any]], options: Sequence[dict[str, Any]]) -> None:
    """Has a plain optimizer take a state by its parameters, and its groups' options.

    Through its own `load_state_dict`, which knows what dtype and device each entry needs.
    """
    optimizer.load_state_dict({**numbered(optimizer, taken, options), param_groups.SHARD_MARK: OWN})


OWN = "own"
"""The mark of what an optimizer is given for its own shard, which needs no comparing."""


def numbered(
    optimizer: Optimizer, taken: Mapping[Any, dict[str, Any]], options: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A state by parameters in the format of state_dict()."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    return {
        "state": {numbers[param]: state for param, state in taken.items()},
        "param_groups": [
            {**option, "params": [numbers[param] for param in group["params"]]}
            for option, group in zip(options, optimizer.param_groups, strict=True)
        ],
    }


def _shards_of(optimizer: Sharded, rank: int | None = None) -> Iterator[ParamShard]:
    """What each rank owns (or `rank` alone), in an order that is the same on all ranks."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    numbers = {param: number for number, param in enumerate(params)}
    for flat in optimizer.shard_groups:
        for owner in range(flat.layout.world) if rank is None else [rank]:
            for span in flat.layout.spans(owner):
                number = numbers.get(flat.params[span.index])
                if number is not None:  # else another optimizer's
                    yield ParamShard(number, flat, span.index, owner, span, optimizer.granularity)


def _unsharded(optimizer: Sharded) -> Iterator[tuple[int, nn.Parameter]]:
    """The parameters that lie in no shard group, and their numbers."""
    sharded = {param for flat in optimizer.shard_groups for param in flat.params}
    params = (param for group in optimizer.param_groups for param in group["params"])
    yield from ((number, param) for number, param in enumerate(params) if param not in sharded)


def _told(optimizer: Sharded, settle: bool) -> str:
    """`_describe` as text; raises ValueError on every rank where a rank's state cannot be written so."""
    text, problem = "", _wrapped(optimizer)
    try:
        text = json.dumps(_describe(optimizer, settle)) if problem is None else ""
    except TypeError as error:
        problem = (
            f"{type(optimizer.optim).__name__} keeps something in its state that is neither a tensor nor a plain value "
            f"({error}). Save each rank's own state_dict() instead of a consolidated one."
        )
    optimizer.comm.compare("the states to consolidate", [], problem)
    return text


def _wrapped(optimizer: Sharded) -> str | None:
    """Where this rank's state has tensors that wrap others, in words for the user: sent, they would come as others."""
    own = [(owned.name, optimizer.part(owned.param)) for owned in _shards_of(optimizer, optimizer.comm.rank)]
    own += [(f"parameter {number}", param) for number, param in _unsharded(optimizer)]
    for name, param in own:
        for key, leaf in leaves.opened(dict(optimizer.optim.state.get(param, {}))).items():
            if leaves.wraps(leaf):
                return (
                    f"the state {leaves.entry_of(key)!r} of {name} is a {type(leaf).__name__}, a tensor that wraps "
                    "others: in a consolidated state it would come out as another. Save each rank's own state_dict() "
                    "instead, which loads into the same model on as many ranks."
                )
    return None


def _describe(optimizer: Sharded, settle: bool) -> dict[int, dict[str, Any]]:
    """What this rank has, by number of the parameter: {key of the leaf: the leaf described}."""
    described: dict[int, dict[str, Any]] = {}
    for owned in _shards_of(optimizer, optimizer.comm.rank):
        own = leaves.opened(_state_of(optimizer, owned, settle))
        described[owned.number] = {key: leaves.described(leaf) for key, leaf in own.items()}
    return described


def _state_of(optimizer: Sharded, owned: ParamShard, settle: bool) -> dict[str, Any]:
    shard = optimizer.part(owned.param)
    state = dict(optimizer.optim.state.get(shard, {}))
    if optimizer.master(owned.flat) is not None:
        held = owned.flat.shard_views[owned.index]
        state["master"] = settled(shard.detach(), held) if settle else shard.detach()
    return state


def _room(entry: dict[str, Any], owned: ParamShard, shape: tuple[int, ...] | None, device: torch.device) -> Any:
    """The leaf itself if it is small, or the tensor of that shape that its shards are to be received in."""
    if "shape" not in entry:
        return leaves.value_of(entry)
    dtype = leaves.dtype_of(entry)
    if shape == owned.full_shape:
        return torch.empty_strided(shape, owned.flat.shapes.strides[owned.index], dtype=dtype, device=device)
    return torch.empty(entry["shape"] if shape is None else shape, dtype=dtype, device=device)


def numbered_groups(optimizer: Sharded) -> list[dict[str, Any]]:
    """The optimizer's groups as they are now, with numbers for parameters."""
    first, groups = 0, []
    for group in optimizer.param_groups:
        numbers = list(range(first, first + len(group["params"])))
        options = {key: value for key, value in group.items() if key not in ("params", param_groups.SHARD_MARK)}
        groups.append({**deepcopy(options), "params": numbers})
        first += len(numbers)
    return groups


def fingerprint(optimizer: Sharded) -> str:
    """The mark of this rank's shard: the same for the same layout only."""
    bounds = [list(flat.layout.bounds) for flat in optimizer.shard_groups]
    layout = hashlib.sha256(json.dumps(bounds).encode()).hexdigest()[:12]
    return f"rank {optimizer.comm.rank} of {optimizer.comm.world}, layout {layout}"
