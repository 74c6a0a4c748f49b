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
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero._torch.autograd import writes_so_far
from zero._torch.telling import warn_user
from zero._torch.tensors import as_dispatching, as_plain_tensors, shares_memory
from zero.comm import Comm
from zero.comm.oplog import READ, part_of
from zero.comm.waiting import calling
from zero.shards.cut import Cut, Group
from zero.tensor_parallel import parts

# ---------------------------------------------------------------------------------------------------- torch's functions
#
# What torch's functions ask of a sharded tensor between steps: one table, by their names.


class Kind(Enum):
    """How a function is answered; GATHERED where the table has none."""

    SILENT = auto()
    """It reads no value, and is answered also while a module that reads the parameter runs."""
    LIKE_ANOTHER = auto()
    """It takes dtype and device of another tensor, and of that no value."""
    SHAPE = auto()
    """Shape, strides and dtype of the full tensor answer it."""
    IDENTITY = auto()
    """By it programs tell tensors apart, or find which are tied."""
    OBJECT = auto()
    """It asks about the object: of the shard, and within a forward of the full tensor."""
    ELEMENTWISE = auto()
    """It gives each element by itself: of this rank's elements."""
    ALIAS = auto()
    """An attribute that does so, on the same memory."""
    NORM = auto()
    """It gives the norm of a tensor, or of each of a list."""
    NUMBER = auto()
    """It gives a number, if it is given tensors alone: ranks compute it of their elements together."""
    DRAWN = auto()
    """It draws numbers in the shape of a tensor."""
    NEVER = auto()
    """It would change what the gathered copy lies in."""
    GATHERED = auto()
    """All else: of a copy that is gathered for the call."""


_NAMES = {
    Kind.SILENT: """
        __delete__ __set__ can_cast get_device is_complex is_conj is_floating_point is_inference is_neg
        is_quantized is_signed is_sparse new_empty new_empty_strided new_full new_ones new_zeros register_hook
        register_post_accumulate_grad_hook requires_grad_ result_type retain_grad
    """,
    Kind.LIKE_ANOTHER: "to type_as",
    Kind.SHAPE: """
        __len__ dim element_size is_contiguous nbytes ndim ndimension nelement numel shape size storage_offset
        stride
    """,
    Kind.IDENTITY: "data_ptr storage untyped_storage _typed_storage",
    Kind.OBJECT: """
        __dir__ __format__ __hash__ __repr__ _has_compatible_shallow_copy_type _is_view dim_order
        is_distributed is_inference is_pinned is_set_to is_shared storage_type
    """,
    Kind.ALIAS: "data real imag",
    Kind.NORM: "norm vector_norm linalg_vector_norm linalg_norm _foreach_norm",
    Kind.NEVER: "resize_ resize_as_ share_memory_ pin_memory module_load __dlpack__ to_dlpack",
    Kind.GATHERED: "T mT H mH",  # attributes that read values
}
"""By the names that torch has for them."""

_WORDS = {
    Kind.ELEMENTWISE: """
        abs absolute acos acosh add addcdiv addcmul alias amp_foreach_non_finite_check_and_unscale and angle
        arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bfloat16 bitwise_and
        bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone conj conj_physical
        constant contiguous copy copysign cos cosh cpu cuda deg2rad detach digamma div divide double
        empty_like eq erf erfc erfinv exp exp2 expm1 fill float float_power floor floor_divide floordiv fmax
        fmin fmod frac frexp full_like ge gt half hypot iadd iand idiv ifloordiv ilshift imod imul int invert
        ior ipow irshift isfinite isinf isnan isneginf isposinf isub itruediv ixor ldexp le leaky_relu lerp
        lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit long lt
        masked_fill maximum minimum mod mul multiply nan_to_num ne neg negative new_empty_like ones_like or
        pos positive pow radd rdiv reciprocal relu remainder rfloordiv rmod rmul round rpow rsqrt rsub
        rtruediv sgn sigmoid sign signbit silu sin sinc sinh sqrt square sub subtract tan tanh threshold to
        true_divide truediv trunc type type_as where xlogy xor zero zeros_like
    """,
    Kind.NUMBER: "sum mean max amax min amin any all count_nonzero dot vdot equal",
    Kind.DRAWN: "rand_like randn_like randint_like",
}
"""By torch's names without underscores and the prefix of those on lists."""

_KIND = {name: kind for names in (_WORDS, _NAMES) for kind, listed in names.items() for name in listed.split()}


@cache
def kind_of(func: Callable[..., Any]) -> tuple[str, str, Kind]:
    """The name of a function or an attribute, that without underscores and the prefix of those on lists, and its
    kind."""
    name = getattr(func, "__name__", "")
    unknown = Kind.GATHERED
    if name == "__get__":  # of the descriptor of an attribute, which alone has the name
        name, unknown = getattr(getattr(func, "__self__", None), "__name__", ""), Kind.SILENT
    word = name.removeprefix("_foreach_").strip("_")
    return name, word, _KIND.get(name) or _KIND.get(word, unknown)


def in_place(name: str) -> bool:
    """Whether torch's function of this name writes into its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return name.endswith("_")


FINITE_CHECK = "amp_foreach_non_finite_check_and_unscale"
"""By which torch.amp.GradScaler looks for gradients that have overflowed: found by one rank, it counts on all."""

VIEWING = {
    *("T", "__getitem__", "as_strided", "chunk", "diagonal", "expand", "expand_as", "flatten", "mT"),
    *("movedim", "narrow", "permute", "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes"),
    *("t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
}
"""Methods and attributes of a tensor that return views of it."""


# ----------------------------------------------------------------------------------------------------- read-only copies
#
# Copies of what is sharded, which refuse to be written: a write would not reach the shards.


class ReadOnly(Tensor):
    """A copy in which a write raises: under DistributedDataParallel it would reach the model. `told`: what it raises.

    What is computed from it, and what is pickled or copied, is plain; views of it are read-only, too. Found by torch's
    counts of writes, and by no table of operators.
    """

    told: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, ReadOnly)]
        own += [one for arg in args if isinstance(arg, (list, tuple)) for one in arg if isinstance(one, ReadOnly)]
        alone = all(issubclass(kind, ReadOnly) for kind in types)
        with as_plain_tensors():
            counted = [one for one in own if not one.is_inference()]  # others count no writes
            before = writes_so_far(counted)
            result = func(*args, **(kwargs or {})) if alone else None
        if not alone:  # what other classes do, they do with plain tensors
            given = [_plain(arg) for arg in args]
            result = func(*given, **{name: _plain(value) for name, value in (kwargs or {}).items()})
        with as_plain_tensors():
            if writes_so_far(counted) != before:
                raise RuntimeError(own[0].told.format(f"`{func.__name__}`"))
            for one in (result if isinstance(result, (list, tuple)) else [result]) if own else ():
                if type(one) is Tensor and shares_memory(one, own[0]):
                    read_only(one, own[0].told)
        return result

    def numpy(self, *, force: bool = False) -> Any:
        array = _plain(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = _plain(self).detach().clone()
        return copy


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if not isinstance(value, ReadOnly):
        return value
    with as_plain_tensors():
        return value.as_subclass(Tensor)


def read_only(tensor: Tensor, told: str) -> Tensor:
    """Makes a plain tensor one that refuses writes. told: the error, with {} in place of the function."""
    if type(tensor) is Tensor:
        tensor.__class__ = ReadOnly
        vars(tensor)["told"] = told
    return tensor


def writable(tensor: Tensor) -> Tensor:
    """Ends `read_only`."""
    if type(tensor) is ReadOnly:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    return tensor


# -------------------------------------------------------------------------------------------------------------- answers


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


def group_of(cut: Cut) -> Group:
    group = cut.group()
    if group is None:
        raise RuntimeError("a shard of a model that does not exist any more is asked for values that other ranks have.")
    return group


def ranks_of(cuts: Sequence[Cut]) -> list[Comm]:
    """The groups of ranks that have elements of these tensors, one after another."""
    owners = [(cut.group(), cut.position) for cut in cuts]
    found = {group.comm.link: group.comm for group, _ in owners if group is not None}
    return [*found.values(), *parts.others_of(group.params[index] for group, index in owners if group is not None)]


OFTEN = 1000
"""Gathers between steps after which the user is told, once."""

_gathered: list[int] = []  # the bytes of each so far, up to that number


def full_of(own: Tensor, cut: Cut) -> Tensor:
    """Collective. A copy of the full tensor of which `own`, plain, has this rank's elements, on its device."""
    group, index = group_of(cut), cut.position
    shape, comm = group.shapes.full[index], group.comm
    flat = own.new_empty(group.layout.numels[index], device=group.full.device)
    stops = {rank: stop for rank, _, stop in group.layout.owners(index)}
    bounds = [0]
    for rank in range(comm.world):
        bounds.append(stops.get(rank, bounds[-1]))
    with torch.no_grad():
        if (span := group.shapes.spans.get(index)) is not None:
            whole = own.shape == shape
            flat[span.start : span.stop] = group.shapes.in_memory_order(index, own) if whole else own.reshape(-1)
        comm.gather(flat, bounds, part_of(group.read_channel, index)).wait()
        if len(_gathered) < OFTEN:
            _gathered.append(flat.nbytes)
            if len(_gathered) == OFTEN:
                warn_user(
                    f"Sharded tensors were gathered {OFTEN} times between steps, {sum(_gathered)} bytes in all, each "
                    "for one function. Norms and sums gather nothing; weights at stage 3 are gathered at once by "
                    "`with model.summon_full_params():`."
                )
        return flat.as_strided(shape, group.shapes.strides[index]).to(own.device)


def write_back(own: Tensor, cut: Cut, full: Tensor) -> None:
    """Writes this rank's elements of a full tensor into its shard, which is plain."""
    group = group_of(cut)
    with torch.no_grad():
        if cut.position in group.shapes.spans:
            own.copy_(group.own_slice(cut.position, full))
        else:  # so that graphs that saved it are refused on every rank
            increment_version(own)


def own_elements(value: Tensor, own: Tensor, cut: Cut) -> Tensor | None:
    """This rank's elements of a plain tensor beside a shard, which stands for a full one; None if they do not fit. They
    lie where the shard does, which with offload is elsewhere than a gradient of stage 2 says."""
    group, index = group_of(cut), cut.position
    shape = group.shapes.full[index]
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
    if index not in group.shapes.spans:
        return value.new_empty(own.shape)
    return group.own_slice(index, value.expand(shape))


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
    channel = READ if cut is None else part_of(group_of(cut).read_channel, cut.position)
    with calling("the norm of several tensors" if cut is None else f"`{name}` of {cut.name}"), torch.no_grad():
        powers = of.own.to(torch.float64, copy=True)
        powers = powers if infinite else powers.pow(of.order)
        if total:
            powers = powers.amax() if infinite else powers.sum()
        of.comm.all_reduce(powers, maximum=infinite, channel=channel)
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
    group = group_of(cut)
    with as_plain_tensors():
        device = held.device  # where its elements may not lie
        known = group.offload.known_norms([own, held], order) if group.offload.active else {}
    kind = own.dtype.to_real() if own.is_complex() else own.dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else None
    if known:  # of a tensor, or of its elements where it has no memory itself
        norm = next(iter(known.values()))
    elif own.numel() or not math.isinf(order):
        norm = torch.linalg.vector_norm(own, order, dtype=wide)
    else:
        norm = torch.zeros((), dtype=wide or kind, device=own.device)
    if (others := parts.others(group.params[cut.position])) is not None:
        powers = norm.double() if math.isinf(order) else norm.double().pow(order)
        others.all_reduce(powers, maximum=math.isinf(order), channel=READ)
        norm = powers if math.isinf(order) else powers.pow(1 / order)
    return _partial(norm if norm.device == device else norm.to(device), order, group.comm, kind, (name, cut), of)


def number_of(word: str, own: Sequence[Tensor], cut: Cut) -> Any:
    """Collective. A number of the full tensors of which these, plain and alike, are this rank's elements: float sums
    are added up in float64."""
    group, one = group_of(cut), own[0].detach()
    numel, channel = group.layout.numels[cut.position], part_of(group.read_channel, cut.position)
    wide = torch.float64 if one.is_floating_point() else torch.int64

    def over_ranks(value: Tensor, *, maximum: bool = False) -> Tensor:
        value = value.to(group.full.device)
        group.comm.all_reduce(value, maximum=maximum, channel=channel)
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
        return (over_ranks(largest, maximum=True) * sign).to(one.dtype)
