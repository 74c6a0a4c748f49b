"""What a sharded tensor answers outside of forward, backward and steps: as the full tensor, which is stored in parts.

    element by element   each rank computes with its own elements (sharded_parameter.py); plain tensors beside are full
    a number             is computed by all ranks of their elements. What torch clips by, torch.linalg.vector_norm and
                         torch._foreach_norm, is a Partial until somebody reads it: torch stacks these norms of all
                         gradients to take their norm, for which one sum over the ranks does. `p.grad.norm()` is read
                         at once: a script computes it on every rank, and prints it on one
    all else             is computed of the gathered tensor, on every rank; what it writes there reaches the owners

All but the first are collective. What one rank asks alone is an operation that the others do not have, which the log of
operations refuses on every rank. Numbers that are computed so have no graph: a backward through them raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero._torch.telling import warn_user
from zero._torch.tensors import as_dispatching, as_plain_tensors
from zero.comm import Comm
from zero.comm.channels import READ, part_of
from zero.comm.waiting import calling
from zero.shards.cut import Cut, Owner
from zero.shards.functions import Kind, kind_of
from zero.tensor_parallel import parts

LEFT = (
    "{} writes into a copy of {}, which was gathered for the call, and would not reach the model. Write into the "
    "parameter itself (`param[0] = ...`, `param.mul_(...)`), or within model.summon_full_params()."
)


class _NoGraph(torch.autograd.Function):
    """A value whose backward raises `told`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Tensor, told: str) -> Tensor:
        ctx.told = told
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.told)


_NOT_OF_LOSS = (
    "a loss reads {} outside of the model's forward, where FSDP has gathered it without a graph. Read it in forward (a "
    "penalty of all parameters is one more output of the model), or take stage 2; numbers for a log are read under "
    "torch.no_grad()."
)


def without_graph(result: Any, described: str | None) -> Any:
    """Has a backward through the result raise, as DistributedDataParallel's would reach the parameter. described: the
    parameter; None if it gets no gradient anyway."""
    if described is None:
        return result
    if isinstance(result, (list, tuple)):
        return type(result)([without_graph(one, described) for one in result])
    if type(result) is Tensor and (result.is_floating_point() or result.is_complex()):
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        return _NoGraph.apply(result, anchor, _NOT_OF_LOSS.format(described))  # type: ignore[no-untyped-call]
    return result


# ------------------------------------------------------------------------------------------------- the full tensor


def owner_of(cut: Cut) -> Owner:
    owner = cut.owner()
    if owner is None:
        raise RuntimeError("a shard of a model that does not exist any more is asked for values that other ranks have.")
    return owner


def ranks_of(cuts: Sequence[Cut]) -> list[Comm]:
    """The groups of ranks that have elements of these tensors, one after another."""
    owners = [(cut.owner(), cut.position) for cut in cuts]
    found = {owner.comm.link: owner.comm for owner, _ in owners if owner is not None}
    return [*found.values(), *parts.others_of(owner.params[index] for owner, index in owners if owner is not None)]


OFTEN = 1000
"""Gathers between steps after which the user is told, once."""

_gathered: list[int] = []  # the bytes of each so far, up to that number


def full_of(own: Tensor, cut: Cut) -> Tensor:
    """Collective. A copy of the full tensor of which `own`, plain, has this rank's elements, on its device."""
    owner, index = owner_of(cut), cut.position
    shape, comm = owner.shapes.full[index], owner.comm
    flat = own.new_empty(owner.layout.numels[index], device=owner.full.device)
    stops = {rank: stop for rank, _, stop in owner.layout.owners(index)}
    bounds = [0]
    for rank in range(comm.world):
        bounds.append(stops.get(rank, bounds[-1]))
    with torch.no_grad():
        if (span := owner.shapes.spans.get(index)) is not None:
            whole = own.shape == shape
            flat[span.start : span.stop] = owner.shapes.in_memory_order(index, own) if whole else own.reshape(-1)
        comm.gather(flat, bounds, part_of(owner.read_channel, index)).wait()
        if len(_gathered) < OFTEN:
            _gathered.append(flat.nbytes)
            if len(_gathered) == OFTEN:
                warn_user(
                    f"Sharded tensors were gathered {OFTEN} times between steps, {sum(_gathered)} bytes in all, each "
                    "for one function. Where many are read at stage 3, gather all: with model.summon_full_params()."
                )
        return flat.as_strided(shape, owner.shapes.strides[index]).to(own.device)


def write_back(own: Tensor, cut: Cut, full: Tensor) -> None:
    """Writes this rank's elements of a full tensor into its shard, which is plain."""
    owner = owner_of(cut)
    with torch.no_grad():
        if cut.position in owner.shapes.spans:
            own.copy_(owner.own_slice(cut.position, full))
        else:  # so that graphs that saved it are refused on every rank
            increment_version(own)


def own_elements(value: Tensor, own: Tensor, cut: Cut) -> Tensor | None:
    """This rank's elements of a plain tensor beside a shard, which stands for a full one; None if they do not fit. They
    lie where the shard does, which with offload is elsewhere than a gradient of stage 2 says."""
    owner, index = owner_of(cut), cut.position
    shape = owner.shapes.full[index]
    value = value if value.device == own.device else value.to(own.device)
    if value.dim() == 0:  # beside a tensor of no dimensions, too, it has a say in the dtype
        return value.reshape(1) if own.dim() and not shape else value
    try:
        fits = torch.broadcast_shapes(shape, value.shape) == shape
    except RuntimeError:
        return None
    if not fits:
        return None
    if value.numel() == 1 and value.shape != shape:
        return value.reshape(1) if own.dim() else value.reshape(())
    if index not in owner.shapes.spans:
        return value.new_empty(own.shape)
    return owner.own_slice(index, value.expand(shape))


# -------------------------------------------------------------------------------------------------------- numbers


class Partial(Tensor):
    """The norm of a sharded tensor that nobody has read yet, or a stack of them. `own`: that of this rank's elements.

    `order`: of the norm. `comm`: the ranks that have the other elements. `kind`: the dtype of the norm. `call`: what
    the user has asked for, and of what. `of`: the parameter, if it gets a gradient.
    """

    own: Tensor
    order: float
    comm: Comm
    kind: torch.dtype
    call: tuple[str, Cut | None]
    of: str | None
    number: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "to" and len(args) == 2 and not kwargs and type(args[1]) is torch.device:
            with as_plain_tensors():
                if args[1] == args[0].device:
                    return first
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if attribute == "dtype" and isinstance(first, Partial):
            return first.kind
        if attribute in ("shape", "ndim", "device", "is_leaf", "layout") or name in ("dim", "size", "numel", "__len__"):
            with as_plain_tensors():
                return func(*args, **kwargs)
        if name == "stack" and len(args) == 1 and not kwargs and (stacked := _stacked(first)) is not None:
            return stacked
        if (
            isinstance(first, Partial)
            and first.dim() == 1
            and kind_of(func)[2] is Kind.NORM
            and order_of(name, args, kwargs) == first.order
        ):
            return without_graph(_number(first, total=True), first.of)
        return func(*map(settled, args), **{key: settled(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where torch reads a number in its own code, as of `torch.tensor(norm)` and `add(other, alpha=norm)`."""
        with torch.no_grad():
            return func(*map(settled, args), **{key: settled(value) for key, value in (kwargs or {}).items()})

    def __float__(self) -> float:
        return float(settled(self))

    def __int__(self) -> int:
        return int(settled(self))

    def __bool__(self) -> bool:
        return bool(settled(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(settled(self).item(), digits)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(settled(self))

    def __format__(self, how: str) -> str:
        return format(settled(self), how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return settled(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return settled(self).__deepcopy__(memo)


def _stacked(given: Any) -> Partial | None:
    """A stack of norms that are of one order and one group of ranks."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, Partial) for one in given):
        return None
    if len({(one.order, one.comm.link) for one in given}) > 1:
        return None
    kind = given[0].kind
    for one in given:
        kind = torch.promote_types(kind, one.kind)
    of = next((one.of for one in given if one.of is not None), None)
    return _partial(torch.stack([one.own for one in given]), given[0].order, given[0].comm, kind, ("stack", None), of)


def _partial(
    own: Tensor, order: float, comm: Comm, kind: torch.dtype, call: tuple[str, Cut | None], of: str | None
) -> Partial:
    made = as_dispatching(own, Partial)
    made.own, made.order, made.comm, made.kind, made.call, made.of, made.number = own, order, comm, kind, call, of, None
    return made


def _number(of: Partial, *, total: bool) -> Tensor:
    """Collective. The number, without a graph; total: of a stack, the norm of its norms."""
    infinite, (name, cut) = math.isinf(of.order), of.call
    channel = READ if cut is None else part_of(owner_of(cut).read_channel, cut.position)
    with calling("the norm of several tensors" if cut is None else f"`{name}` of {cut.name}"), torch.no_grad():
        powers = of.own.to(torch.float64, copy=True)
        powers = powers if infinite else powers.pow(of.order)
        if total:
            powers = powers.amax() if infinite else powers.sum()
        if infinite:  # a maximum of Gloo's drops nan
            both = torch.stack([powers.nan_to_num(0, math.inf), powers.isnan().double()])
            of.comm.all_reduce(both, maximum=True, channel=channel)
            powers = torch.where(both[1] > 0, math.nan, both[0])
        else:
            of.comm.all_reduce(powers, channel=channel)
        return (powers if infinite else powers.pow(1 / of.order)).to(of.kind)


def settled(value: Any) -> Any:
    """Collective for a Partial that nobody has read yet, alone or in a list. The number."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(settled, value))
    if not isinstance(value, Partial):
        return value
    if value.number is None:
        value.number = _number(value, total=False)
    return without_graph(value.number, value.of)  # not what is kept: it may have been read under no_grad() before


def order_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The order of a norm of all elements; None for another norm, which the gathered tensor has."""
    given = {**dict(zip(("p" if name == "norm" else "ord", "dim", "keepdim"), args[1:], strict=False)), **kwargs}
    order = given.pop("p", given.pop("ord", None))
    if any(value is not None and value is not False for value in given.values()) or len(args) > 4:
        return None
    if order is not None and name == "linalg_norm":
        return None  # of a matrix it is another one
    if order is None or order == "fro":
        return 2.0
    return float(order) if isinstance(order, (int, float)) and order > 0 else None


def norm_of(held: Any, own: Tensor, cut: Cut, order: float, name: str, of: str | None) -> Partial:
    """Local, but for parts of tensor parallelism. The norm of the full tensor `held`, nobody having read it yet. own:
    its elements here, without a graph. name: of the function that was called. of: the parameter, if it has a graph."""
    owner = owner_of(cut)
    with as_plain_tensors():
        device = held.device  # where its elements may not lie
        known = owner.offload.known_norms([own, held], order) if owner.offload.active else {}
    kind = own.dtype.to_real() if own.is_complex() else own.dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else None
    if known:  # of a tensor, or of its elements where it has no memory itself
        norm = next(iter(known.values()))
    elif own.numel() or not math.isinf(order):
        norm = torch.linalg.vector_norm(own, order, dtype=wide)
    else:
        norm = torch.zeros((), dtype=wide or kind, device=own.device)
    if (others := parts.others(owner.params[cut.position])) is not None:
        powers = norm.double() if math.isinf(order) else norm.double().pow(order)
        others.all_reduce(powers, maximum=math.isinf(order), channel=READ)
        norm = powers if math.isinf(order) else powers.pow(1 / order)
    return _partial(norm if norm.device == device else norm.to(device), order, owner.comm, kind, (name, cut), of)


def number_of(word: str, own: Sequence[Tensor], cut: Cut) -> Any:
    """Collective. A number of the full tensors of which these, plain and alike, are this rank's elements: float sums
    are added up in float64."""
    owner, one = owner_of(cut), own[0].detach()
    numel, channel = owner.layout.numels[cut.position], part_of(owner.read_channel, cut.position)
    wide = torch.float64 if one.is_floating_point() else torch.int64

    def over_ranks(value: Tensor, *, maximum: bool = False) -> Tensor:
        value = value.to(owner.full.device)
        owner.comm.all_reduce(value, maximum=maximum, channel=channel)
        return value.to(one.device)

    with torch.no_grad():
        if word in ("dot", "vdot"):
            one, word = one.to(wide) * own[1].detach().to(wide), "sum"
            return over_ranks(one.sum()).to(own[0].dtype)
        if word == "equal":
            differ = over_ranks((one != own[1].detach()).sum())
            return not int(differ)
        if word in ("sum", "mean"):
            total = over_ranks(one.sum(dtype=wide))
            if word == "mean":
                total = total / numel
            return total.to(one.dtype if one.is_floating_point() else torch.int64)
        if word in ("any", "all", "count_nonzero"):
            found = over_ranks(torch.count_nonzero(one) if word != "all" else (one == 0).sum())
            if word == "count_nonzero":
                return found
            truth = found > 0 if word == "any" else found == 0
            return truth.to(torch.uint8) if one.dtype == torch.uint8 else truth
        sign = 1 if word in ("max", "amax") else -1
        none = -math.inf if one.is_floating_point() else torch.iinfo(torch.int64).min
        largest = (one.to(wide) * sign).max() if one.numel() else torch.full((), none, dtype=wide, device=one.device)
        undefined = largest.isnan().to(wide)  # which no comparison finds
        largest, undefined = over_ranks(
            torch.stack([largest.nan_to_num(none, math.inf, none), undefined]), maximum=True
        )
        found = largest * sign
        return (torch.where(undefined > 0, math.nan, found) if one.is_floating_point() else found).to(one.dtype)
