"""Optimizer state: this rank's parts, and the whole in the plain optimizer's format.

Of a parameter that is cut, an entry of the state that has the shape of the part is a part of a whole tensor of the
parameter's shape. One that has a row for each block of so many elements (a divisor of the granularity that cuts are
multiples of) is a part of a tensor of all rows. A single value (a step count) is the same for all parts. Of a parameter
that lies whole with one rank, every entry is taken as it is. Lists and tuples in the state are taken item by item.

A master of a part is an entry like the others, called "master", as the next step takes it (`settled`); plain optimizers
carry it along.

    whole   {"state": {number of the parameter: {key: tensor or value}}, "param_groups": [... "params": [numbers]]}
    part    the same with this rank's parts for tensors; "zero_part" says of which layout, so that it is not mistaken
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, part_shape
from zero.oss.groups import options as group_options
from zero.oss.layout import Span

_PART = "zero_part"


class Sharded(Protocol):
    """An optimizer of parameters that lie in parts, such as OSS.

    optim: the one that steps the parts of this rank.
    param_groups: the whole parameters, by group.
    flat_groups: where they lie. What lies in none is whole, and the same, on every rank.
    granularity: elements of which cuts inside parameters are multiples, if the user said so.
    """

    @property
    def comm(self) -> Comm: ...
    @property
    def optim(self) -> Optimizer: ...
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def flat_groups(self) -> list[FlatGroup]: ...
    @property
    def granularity(self) -> int | None: ...
    @property
    def cuts_parameters(self) -> bool: ...
    @property
    def keeps_masters(self) -> bool: ...
    def part(self, param: nn.Parameter) -> nn.Parameter:
        """What of the parameter `optim` steps."""

    def master(self, flat: FlatGroup) -> Tensor | None:
        """This rank's part of the group in another dtype, if parts are stepped so."""


@dataclass(frozen=True)
class _Piece:
    """What one rank owns of one parameter."""

    number: int
    flat: FlatGroup
    index: int
    owner: int
    span: Span
    granularity: int | None

    @property
    def param(self) -> nn.Parameter:
        return self.flat.params[self.index]

    @property
    def cut(self) -> bool:
        return self.span.numel < self.flat.layout.numels[self.index]

    def is_part(self, shape: tuple[int, ...]) -> bool:
        return self.cut and shape == part_shape(self.flat.whole_shape(self.index)[0], self.span.numel)

    def slot(self, whole: Tensor) -> Tensor:
        """Where this piece lies in a whole tensor of the parameter's shape, flat, in the order of the layout.

        Or in one of rows by blocks.
        """
        if whole.shape == self.flat.whole_shape(self.index)[0]:
            return self.flat.in_memory_order(self.index, whole)[self.span.start : self.span.stop]
        rows = self.rows(len(whole))
        assert rows is not None
        return whole[rows].reshape(-1)

    def rows(self, total: int) -> slice | None:
        """Which rows belong to this piece in a state that has one for each block, so many in all; None if it has not.

        A parameter that is cut has more elements than the granularity: two divisors of it then give different totals.
        """
        numel = self.flat.layout.numels[self.index]
        for block in _divisors(self.granularity or 0):
            if -(-numel // block) == total:
                return slice(self.span.start // block, -(-self.span.stop // block))
        return None


def consolidate(optimizer: Sharded, to: int | None, *, settle: bool = True) -> dict[str, Any] | None:
    """Collective. The whole state on rank `to` of the group (None: on every rank), None elsewhere.

    settle: masters are told as the next step takes them; otherwise as they are, whatever the parameters hold by now.

    Parts travel straight into their place in the whole tensors; a rank that only sends needs no memory for it.
    Raises ValueError, on every rank, where `to` is no rank of the group, or where state cannot be put together.
    """
    comm = optimizer.comm
    if to is not None and not 0 <= to < comm.world:
        raise ValueError(
            f"to={to} is no rank of the group of {comm.world}: choose 0 to {comm.world - 1}, or None for all."
        )
    if comm.world == 1:
        return part_of(optimizer, as_whole=True, settle=settle)
    told = [json.loads(text) for text in comm.all_gather_text(_told(optimizer, settle))]
    recipient = to is None or to == comm.rank
    whole: dict[int, dict[str, Any]] = {}
    transfers: list[tuple[int, Tensor | None]] = []
    pieces = [(piece, told[piece.owner].get(str(piece.number), {})) for piece in _pieces(optimizer)]
    rows = _count_rows(pieces)
    for piece, entries in pieces:
        state = whole.setdefault(piece.number, {})
        own = _leaves_of(optimizer, piece, settle) if piece.owner == comm.rank else {}
        for key, entry in entries.items():
            shape = _whole_shape(piece, key, entry, rows)
            if key in state and shape is None:
                continue  # the same for all parts of this parameter, and taken from the first
            if key not in state:
                state[key] = _room(entry, piece, shape) if recipient else None
            if "shape" not in entry:
                continue
            tensor = (state[key].view(-1) if shape is None else piece.slot(state[key])) if recipient else None
            if piece.owner == comm.rank:
                source = own[key].detach().contiguous().view(-1)
                tensor = source if tensor is None else tensor.copy_(source)
            transfers.append((piece.owner, tensor))
    comm.collect(transfers, to)
    if not recipient:
        return None
    states = {number: _nested(leaves) for number, leaves in whole.items()}
    states |= {number: deepcopy(optimizer.optim.state.get(param, {})) for number, param in _unsharded(optimizer)}
    return {
        "state": {number: state for number, state in sorted(states.items()) if state},
        "param_groups": _groups(optimizer),
    }


def _count_rows(pieces: list[tuple[_Piece, dict[str, Any]]]) -> Counter[tuple[int, str]]:
    """How long the tensors of all pieces of a parameter are together."""
    rows: Counter[tuple[int, str]] = Counter()
    for piece, entries in pieces:
        for key, entry in entries.items():
            rows[piece.number, key] += entry["shape"][0] if "shape" in entry else 0
    return rows


def _whole_shape(
    piece: _Piece, key: str, entry: dict[str, Any], rows: Counter[tuple[int, str]]
) -> tuple[int, ...] | None:
    """The shape of the tensor that a piece's is a part of; None if it is no part, but all there is."""
    if not piece.cut or "shape" not in entry:
        return None
    length, *rest = entry["shape"]
    if piece.is_part((length, *rest)):
        return piece.flat.whole_shape(piece.index)[0]
    own = piece.rows(rows[piece.number, key])
    if own is not None and own.stop - own.start == length:
        return (rows[piece.number, key], *rest)
    raise ValueError(
        f"the state {key.partition(_WITHIN)[0]!r} of {piece.flat.names[piece.index]} has the shape {entry['shape']}, "
        "not the part's, a single value's, or a row for each block of a divisor of the granularity "
        f"({piece.granularity}): how parts of it make up a whole, the optimizer alone knows. Save each rank's own "
        "state_dict(), or build OSS with partition='whole'."
    )


def part_of(optimizer: Sharded, *, as_whole: bool = False, settle: bool = True) -> dict[str, Any]:
    """This rank's part, without communication. as_whole: it is all there is, and needs no mark of a part."""
    pieces = {piece.number: _state_of(optimizer, piece, settle) for piece in _pieces(optimizer, optimizer.comm.rank)}
    pieces |= {number: dict(optimizer.optim.state.get(param, {})) for number, param in _unsharded(optimizer)}
    state = {number: state for number, state in sorted(pieces.items()) if state}
    mark = {} if as_whole else {_PART: _fingerprint(optimizer)}
    return {"state": state, "param_groups": _groups(optimizer), **mark}


def load(optimizer: Sharded, state_dict: dict[str, Any]) -> None:
    """Takes a whole state or this rank's own part. Raises ValueError, and changes nothing, where it does not fit."""
    groups = state_dict["param_groups"]
    found = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if found != expected:
        raise ValueError(
            f"the state has parameter groups of {found} parameters, the optimizer has {expected}. "
            "Build OSS from the same parameters, in the same groups, as the optimizer that was saved."
        )
    is_part = _PART in state_dict
    if is_part and state_dict[_PART] != _fingerprint(optimizer):
        raise ValueError(
            f"the state is one rank's part ({state_dict[_PART]}), but this is {_fingerprint(optimizer)}. "
            "Call consolidate_state_dict() before state_dict() to save what loads anywhere."
        )
    numbers = [number for group in groups for number in group["params"]]
    if not is_part:
        _refuse_other_shapes(optimizer, state_dict["state"], numbers)
    taken: dict[nn.Parameter, dict[str, Any]] = {}
    for piece in _pieces(optimizer, optimizer.comm.rank):
        state = state_dict["state"].get(numbers[piece.number])
        if state is not None:
            taken[optimizer.part(piece.param)] = {key: _fitting(value, piece, is_part) for key, value in state.items()}
    for number, param in _unsharded(optimizer):
        if numbers[number] in state_dict["state"]:
            taken[param] = deepcopy(state_dict["state"][numbers[number]])
    hand_over(optimizer, taken, groups)


def _refuse_other_shapes(optimizer: Sharded, states: dict[Any, dict[str, Any]], numbers: list[Any]) -> None:
    """On every rank, whatever it owns. Where parameters lie whole, an optimizer may keep what shapes it likes."""
    for piece in _pieces(optimizer):
        shape = piece.flat.whole_shape(piece.index)[0]
        for key, value in states.get(numbers[piece.number], {}).items():
            for leaf in dict(_leaves(key, value)).values():
                if not optimizer.cuts_parameters or not isinstance(leaf, Tensor) or not leaf.dim():
                    continue
                if leaf.shape == shape or piece.rows(len(leaf)) is not None:
                    continue
                raise ValueError(
                    f"the state of {piece.flat.names[piece.index]} has {key!r} of shape {list(leaf.shape)}, but the "
                    f"parameter has {list(shape)}, and is cut between ranks. Load it into the same model, or build OSS "
                    "with partition='whole'."
                )


def hand_over(optimizer: Sharded, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Through the inner optimizer's own `load_state_dict`, which knows what dtype and device each entry needs."""
    inner = optimizer.optim
    masters = {
        part: state.pop("master") for part, state in taken.items() if optimizer.keeps_masters and "master" in state
    }
    parts = [part for group in inner.param_groups for part in group["params"]]
    position = {part: number for number, part in enumerate(parts)}
    options = [deepcopy(group_options(group)) for group in groups]
    inner.load_state_dict(
        {
            "state": {position[part]: state for part, state in taken.items()},
            "param_groups": [
                {**option, "params": [position[part] for part in group["params"]]}
                for option, group in zip(options, inner.param_groups, strict=True)
            ],
        }
    )
    for option, group in zip(options, optimizer.param_groups, strict=True):
        group.update(option)
    with torch.no_grad():
        for part, master in masters.items():
            part.copy_(master)


def settled(master: Tensor, part: Tensor) -> Tensor:
    """A master as the next step takes it: where something else was written into the parameters, that.

    Where nothing was, the master itself. It is not written to: the weights that belong to it may be loaded after it.
    """
    written = part != master.to(part.dtype)
    return torch.where(written, part.to(master.dtype), master) if written.any() else master


def _fitting(value: Any, piece: _Piece, is_part: bool) -> Any:
    """What this rank's part has of an entry of the state, as a copy."""
    if type(value) in (list, tuple):
        return type(value)(_fitting(item, piece, is_part) for item in value)
    if not isinstance(value, Tensor):
        return value
    if is_part or not piece.cut or value.dim() == 0:
        return value.clone()
    whole = value.shape == piece.flat.whole_shape(piece.index)[0]
    shape = piece.flat.part_views[piece.index].shape if whole else (-1, *value.shape[1:])
    return piece.slot(value).clone().view(shape)


def _pieces(optimizer: Sharded, rank: int | None = None) -> Iterator[_Piece]:
    """What each rank owns (or `rank` alone), in an order that is the same on all ranks."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    numbers = {param: number for number, param in enumerate(params)}
    for flat in optimizer.flat_groups:
        for owner in range(flat.layout.world) if rank is None else [rank]:
            for span in flat.layout.spans(owner):
                number = numbers.get(flat.params[span.index])
                if number is not None:  # else another optimizer's
                    yield _Piece(number, flat, span.index, owner, span, optimizer.granularity)


def _unsharded(optimizer: Sharded) -> Iterator[tuple[int, nn.Parameter]]:
    """The parameters that lie in no flat group, and their numbers."""
    sharded = {param for flat in optimizer.flat_groups for param in flat.params}
    params = (param for group in optimizer.param_groups for param in group["params"])
    yield from ((number, param) for number, param in enumerate(params) if param not in sharded)


def _told(optimizer: Sharded, settle: bool) -> str:
    """`_describe` as text; raises ValueError on every rank where a rank's state cannot be told so."""
    text, problem = "", None
    try:
        text = json.dumps(_describe(optimizer, settle))
    except TypeError as error:
        problem = (
            f"{type(optimizer.optim).__name__} keeps something in its state that is neither a tensor nor a plain value "
            f"({error}). Save each rank's own state_dict() instead of a consolidated one."
        )
    optimizer.comm.compare("the states to consolidate", [], problem)
    return text


def _describe(optimizer: Sharded, settle: bool) -> dict[int, dict[str, Any]]:
    """What this rank has: of each tensor its shape and dtype, of everything small the value itself."""
    told: dict[int, dict[str, Any]] = {}
    for piece in _pieces(optimizer, optimizer.comm.rank):
        for key, value in _leaves_of(optimizer, piece, settle).items():
            entry: dict[str, Any] = {"value": value}
            if isinstance(value, _Opened):
                entry = {"opened": [value.kind, value.length]}
            elif isinstance(value, Tensor):
                entry = {"dtype": str(value.dtype).removeprefix("torch."), "device": value.device.type}
                entry |= {"shape": list(value.shape)} if value.dim() else {"value": value.item()}
            told.setdefault(piece.number, {})[key] = entry
    return told


def _state_of(optimizer: Sharded, piece: _Piece, settle: bool) -> dict[str, Any]:
    part = optimizer.part(piece.param)
    state = dict(optimizer.optim.state.get(part, {}))
    if optimizer.master(piece.flat) is not None:
        held = piece.flat.part_views[piece.index]
        state["master"] = settled(part.detach(), held) if settle else part.detach()
    return state


@dataclass(frozen=True)
class _Opened:
    """Stands for a list or tuple, the items of which stand by themselves."""

    kind: str
    length: int


_WITHIN = "\n"
"""Between the key of a list and the number of an item of it."""


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The entry as it is, or what a list or tuple is opened into."""
    if type(value) in (list, tuple):
        yield key, _Opened(type(value).__name__, len(value))
        for number, item in enumerate(value):
            yield from _leaves(f"{key}{_WITHIN}{number}", item)
    else:
        yield key, value


def _leaves_of(optimizer: Sharded, piece: _Piece, settle: bool) -> dict[str, Any]:
    return {at: leaf for key, value in _state_of(optimizer, piece, settle).items() for at, leaf in _leaves(key, value)}


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The other way round."""

    def closed(key: str) -> Any:
        value = leaves[key]
        if not isinstance(value, _Opened):
            return value
        items = [closed(f"{key}{_WITHIN}{number}") for number in range(value.length)]
        return items if value.kind == "list" else tuple(items)

    return {key: closed(key) for key in leaves if _WITHIN not in key}


def _room(entry: dict[str, Any], piece: _Piece, shape: tuple[int, ...] | None) -> Any:
    """The entry itself if it is small, or the tensor of that shape that its parts are to be received in."""
    if "opened" in entry:
        return _Opened(*entry["opened"])
    if "dtype" not in entry:
        return entry["value"]
    dtype = getattr(torch, entry["dtype"])
    if "value" in entry:
        return torch.tensor(entry["value"], dtype=dtype, device=entry["device"])
    of_parameter, stride = piece.flat.whole_shape(piece.index)
    if shape == of_parameter:
        return torch.empty_strided(shape, stride, dtype=dtype, device=piece.param.device)
    return torch.empty(entry["shape"] if shape is None else shape, dtype=dtype, device=piece.param.device)


def _divisors(number: int) -> Iterator[int]:
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            yield from {low, number // low}


def _groups(optimizer: Sharded) -> list[dict[str, Any]]:
    first, groups = 0, []
    for group in optimizer.param_groups:
        numbers = list(range(first, first + len(group["params"])))
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**deepcopy(options), "params": numbers})
        first += len(numbers)
    return groups


def _fingerprint(optimizer: Sharded) -> str:
    bounds = [list(flat.layout.bounds) for flat in optimizer.flat_groups]
    return f"rank {optimizer.comm.rank} of {optimizer.comm.world}, segments {bounds}"
