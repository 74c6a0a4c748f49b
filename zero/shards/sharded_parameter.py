"""What a parameter is while it is sharded at stage 3: the same object, of a class that says so.

    nn.Parameter        while an optimizer steps it. Its data is a plain tensor
    FullParameter       while it is full in memory that is freed: `.data`, whose writes torch does not count, is noted
    Lent                `.data` and `.detach()` of that, and views of them: memory that is freed with the unit's. Who
                        has kept one, and reads it when that is freed, is told so
    ShardedParameter    otherwise. Its data is this rank's shard, in the shape of the shard
    Shard               its gradient then, tensors of its shape in the optimizer's state, its `.data`, `.detach()`, and
                        what is computed from these element by element

torch changes the class of a parameter in the same way when it gives an UninitializedParameter its memory. An element
is the same number whether it is computed from the full tensor or from a shard, so element-wise work runs on the shard.
Shapes are those of the full tensor; what else is asked is answered by all ranks (answers.py). How does not depend on
values, but on the function and on how parameters are cut, so that every rank goes the same way.

`param.as_subclass(torch.Tensor)` is the plain shard, for whoever asks for it by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, accelerator, nn
from torch.optim import Optimizer

from zero._torch.autograd import writes_so_far
from zero._torch.tensors import FakeTensor as Fake
from zero._torch.tensors import Rebound, as_plain_tensors, has_values, shares_memory
from zero.comm.oplog import READ
from zero.comm.waiting import calling
from zero.measure.kinds import ELEMENTWISE, SINGLE
from zero.shards.answers import (
    FINITE_CHECK,
    LEFT,
    VIEWING,
    Kind,
    full_of,
    in_place,
    kind_of,
    norm_of,
    number_of,
    order_of,
    own_elements,
    ranks_of,
    read_only,
    settled,
    without_graph,
    write_back,
)
from zero.shards.cut import Asked, Cut, of_param, process_of_shards
from zero.shards.shapes import with_own_storage


def _dispatched(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """What torch calls in place of a function that was given any ShardedParameter or Shard."""
    if len(args) == 2 and not kwargs and func in _OF_CLIPPING:
        of, number = args
        if isinstance(of, Sharded) and not isinstance(of, _AsParameter) and _is_number(number):
            cut, own = of.cut, of.own()  # type: ignore[attr-defined]
            _refuse_elsewhere(of, cut)
            if func is Tensor.mul_:
                return _scaled(of, own, cut, number)
            if isinstance(number, (int, float)) and number > 0:
                return norm_of(of, own, cut, float(number), "vector_norm", None)
    (name, _, kind), kwargs = kind_of(func), kwargs or {}
    if kind is Kind.LIKE_ANOTHER and not isinstance(args[0], Sharded):
        kind = Kind.SILENT
    if name.startswith("new_") and not any(_shards_in((*args[1:], *kwargs.values()))):
        return _plainly(func, [own_of(args[0]), *args[1:]], kwargs)
    if kind is Kind.SILENT:
        return _plainly(func, args, kwargs)
    if kind is Kind.SHAPE or (name == "detach" and _without_values(args[0])):
        return _of_shape(func, name, args, kwargs)
    if name == "detach_":
        return args[0]  # torch refuses views, as these are, and none has a graph
    if name == "copy_" and _load(*args[:2]):
        return args[0]
    # Behind what shapes answer, as this gathers. Those parameters are plain now: torch takes them as they are.
    if _unshard_to_read((*args, *kwargs.values())):
        if name in ("data", "detach"):  # of the class that the parameter has now
            return args[0].data if name == "data" else args[0].detach()
        return func(*args, **kwargs)
    if kind is Kind.IDENTITY and has_values(args[0]):
        return _own_storage(name, args[0])
    if kind in (Kind.IDENTITY, Kind.OBJECT):
        return _plainly(func, args, kwargs)
    first = next(_shards_in((*args, *kwargs.values())))
    _refuse_elsewhere(first, cut_of(first))
    if kind is Kind.NEVER:
        _refuse(f"`{name}`", first)
    if name in ("backward", "grad") and not (args and isinstance(args[0], Sharded)):
        raise RuntimeError(
            f"`{name}` needs the full tensor, and was given a shard of {cut_of(first).described()}. Leave `inputs` "
            "out; drop gradients that are not wanted (param.grad = None), or freeze parameters; or take stage 2."
        )
    return _answer(func, args, kwargs, first)


# By which torch clips: of each gradient, so their way is the shortest.
_OF_CLIPPING = {torch.linalg.vector_norm, Tensor.mul_}


def _scaled(of: Sharded, own: Tensor, cut: Cut, number: Any) -> Sharded:
    if isinstance(number, Tensor) and number.device != own.device:
        number = number.to(own.device)
    group = cut.group()
    # In the memory of the CPU a factor of 1 takes a third of the time of a step.
    if group is None or not group.offload.active or own.device.type != "cpu" or float(number) != 1:
        own.mul_(number)
    return of


def _refuse_elsewhere(shard: Any, cut: Cut) -> None:
    """Raises RuntimeError beside the thread that runs the model, and in a process that is forked of it."""
    group = cut.group()
    if group is not None and (reads := group.reads()) is not None and reads.beside:
        _refuse_beside(shard)
    if os.getpid() != process_of_shards():
        raise RuntimeError(
            f"a forked process, such as a worker of a DataLoader, reads {cut.described()}: a shard of which "
            "no other rank's elements reach it. Read parameters in the process that trains."
        )


def _answer(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], first: Tensor) -> Any:
    """What the full tensors would answer; collective unless it is computed element by element."""
    name, word, kind = kind_of(func)
    if not args and "tensor" in kwargs:  # torch.nn.init names it
        args, kwargs = [kwargs["tensor"]], {key: value for key, value in kwargs.items() if key != "tensor"}
    # where(condition) alone returns positions: how many depends on the values of each rank.
    by_element = kind is Kind.LIKE_ANOTHER or (kind is Kind.ELEMENTWISE and (len(args) > 1 or word != "where"))
    by_element = by_element and not _reordered(word, args, kwargs, first)
    if by_element and args and args[0] is first and not kwargs and all(map(_is_number, args[1:])):
        own, cut = own_of(first), cut_of(first)
        numbers = [own_elements(one, own, cut) if isinstance(one, Tensor) else one for one in args[1:]]
        return _element_by_element(func, word, args, ([_in_graph(first), *numbers], kwargs))
    with as_plain_tensors():
        reading = [one for one in _shards_in((*args, *kwargs.values())) if one.requires_grad]
    of = cut_of(reading[0]).name if reading and torch.is_grad_enabled() else None
    if kind is Kind.NORM and args and (order := order_of(name, args, kwargs)) is not None:
        if args[0] is first:
            norm = norm_of(first, own_of(first), cut_of(first), order, name, of)
            return settled(norm) if name == "norm" else norm
        if name.startswith("_") and all(isinstance(one, Sharded) for one in args[0]):
            return [norm_of(one, own_of(one), cut_of(one), order, name, of) for one in args[0]]
    args, kwargs = settled([*args]), {key: settled(value) for key, value in kwargs.items()}
    if name in ("view_as", "expand_as") and len(args) > 1 and args[0] is args[1] and torch.is_grad_enabled():
        _refuse(f"`{name}` of a tensor and itself, by which hooks look for its node,", first)
    shards, every = [*_shards_in((*args, *kwargs.values()))], [*_tensors_in((*args, *kwargs.values()))]
    call = f"`{name}` of {cut_of(first).name}"
    alike = len(shards) == len(every) and all(cut_of(first).matches(cut_of(one)) for one in shards)
    if kind is Kind.NUMBER and not kwargs and alike and len(args) == len(every) and _has_number(word, shards):
        with calling(call):
            return without_graph(number_of(word, [*map(own_of, shards)], cut_of(first)), of)
    if by_element and (given := _own_beside(name, args, kwargs, like_another=kind is Kind.LIKE_ANOTHER)) is not None:
        refuse_freed((*args, *kwargs.values()))
        return _element_by_element(func, word, args, given, out=kwargs.get("out"))
    if kind is Kind.ALIAS:
        return _element_by_element(func, word, args, ([own_of(first)], kwargs))
    if kind is Kind.DRAWN and args[0] is first:
        full = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
        drawn: Any = own_elements(func(full, *args[1:], **kwargs), own_of(first), cut_of(first))
        return _as_shards(drawn.clone(), first)  # a view would keep all that was drawn
    return _of_gathered(func, name, args, kwargs, call, of)


def _reordered(word: str, args: Sequence[Any], kwargs: dict[str, Any], first: Tensor) -> bool:
    """Whether a function is to return another order in memory than that of the parameter."""
    asked = next((one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.memory_format)), None)
    if asked is None and word != "contiguous":
        return False
    if asked is torch.preserve_format:
        return False
    full = torch.empty_strided(first.shape, first.stride(), device="meta")
    return not full.is_contiguous(memory_format=asked or torch.contiguous_format)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (type(value) is Tensor and not value.dim())


def own_of(shard: Any) -> Tensor:
    """This rank's elements of a sharded tensor, plain and without a graph."""
    return shard.own()  # type: ignore[no-any-return]


def _has_number(word: str, shards: Sequence[Tensor]) -> bool:
    with as_plain_tensors():
        one = own_of(shards[0])
        if one.is_complex() or one.dtype in (torch.uint16, torch.uint32, torch.uint64):
            return False
        if word in ("dot", "vdot"):
            return one.dim() == 1 and one.is_floating_point() and shards[0].dtype == shards[-1].dtype
        return len(shards) == (2 if word == "equal" else 1) and (word != "mean" or one.is_floating_point())


def _own_beside(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], *, like_another: bool
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments with this rank's elements in place of sharded tensors, and of full ones beside them; None if the
    function cannot be computed of these: with tensors of other shapes, or cut in another way, or into a plain one."""
    lists = [value for value in args if isinstance(value, (list, tuple))] if "_foreach_" in name else []
    written = args[0] if in_place(name) and args else kwargs.get("out")
    if isinstance(written, Tensor) and not isinstance(written, Sharded):
        return None

    def beside(values: Sequence[Any]) -> list[Any] | None:
        first = next(_shards_in(values), None)
        if first is None:
            return [*values]
        if lists and in_place(name) and not isinstance(values[0], Sharded):
            return None  # it is written into a full one
        cut, found = cut_of(first), list[Any]()
        for value in values:
            if isinstance(value, Sharded):
                shard: Any = value
                if not cut.matches(cut_of(shard)):
                    return None
                value = _in_graph(value)
            elif isinstance(value, Tensor) and not like_another:
                # What is computed of a gradient of stage 2 element by element has no graph.
                has_graph = isinstance(first, (Shard, _AsParameter)) or in_place(name)
                if value.requires_grad and torch.is_grad_enabled() and not has_graph:
                    return None
                with torch.no_grad() if not value.requires_grad else nullcontext():
                    value = own_elements(value, own_of(first), cut)
                if value is None:
                    return None
            found.append(value)
        return found

    if lists:
        at_positions = [beside(values) for values in zip(*lists, strict=True)]
        if any(values is None for values in at_positions):
            return None
        columns = iter(zip(*at_positions, strict=True))
        return [list(next(columns)) if isinstance(value, (list, tuple)) else value for value in args], kwargs
    if name.strip("_") == FINITE_CHECK:
        return [[_in_graph(one) for one in args[0]], *args[1:]], kwargs
    if any(isinstance(value, (list, tuple)) and [*_shards_in(value)] for value in args):
        given = [
            [_in_graph(one) if isinstance(one, Sharded) else one for one in value]
            if isinstance(value, (list, tuple))
            else value
            for value in args
        ]
        return given, kwargs
    flat = beside([*args, *kwargs.values()])
    return None if flat is None else (flat[: len(args)], dict(zip(kwargs, flat[len(args) :], strict=True)))


def _in_graph(shard: Any) -> Any:
    """As own_of; a parameter stays, as what is computed of it element by element has a graph."""
    return shard if isinstance(shard, (Shard, _AsParameter)) else own_of(shard)


def _element_by_element(
    func: Callable[..., Any],
    word: str,
    args: Sequence[Any],
    given: tuple[Sequence[Any], dict[str, Any]],
    *,
    out: Any = None,
) -> Any:
    if word == FINITE_CHECK and args[2].is_pinned():
        # torch has copied the scale from a GPU without waiting, also to where the host reads it: to pinned memory.
        accelerator.current_stream().synchronize()
    # What is written into has no graph, and gets none of a parameter beside it.
    first: Any = args[0]
    into_plain = in_place(func.__name__) and isinstance(first, Sharded) and not _plainly(_REQUIRES, [first], {})
    with torch.no_grad() if into_plain else nullcontext():
        result = _plainly(func, *given)
    if word == FINITE_CHECK:
        _spread_overflow(*args[:2])
    if out is not None:
        return out
    if isinstance(first, (list, tuple)):
        return None if result is None else _as_shards(result, first)
    if result is given[0][0] or (isinstance(first, Sharded) and result is first):
        return first
    return _as_shards(result, next(_shards_in([*args])))


def _of_gathered(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], call: str, of: str | None
) -> Any:
    """Collective. Computes a function of the full tensors; writes what it has written into the first one."""
    target: Any = (
        args[0] if (in_place(name) or name == "__setitem__") and args and isinstance(args[0], Sharded) else None
    )
    home = str(getattr(func, "__module__", ""))
    tracked = torch.is_grad_enabled() and home != "torch.nn.init"  # which writes under torch.no_grad()
    if target is not None and tracked and target.requires_grad and target.is_leaf:
        raise RuntimeError(
            f"{call} writes into a parameter that requires grad. Write under torch.no_grad(), as with a full parameter."
        )
    gathered: dict[int, tuple[Tensor, Tensor]] = {}

    def full(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(full, value))
        if not isinstance(value, Sharded):
            return value
        if id(value) not in gathered:
            gathered[id(value)] = value, full_of(own_of(value), cut_of(value))  # type: ignore[arg-type, assignment]
        return gathered[id(value)][1]

    with calling(call):
        given, named = [full(value) for value in args], {key: full(value) for key, value in kwargs.items()}
    versions = [writes_so_far([copy]) for _, copy in gathered.values()]
    result = func(*given, **named)
    # A collective of torch.distributed writes without a count.
    always = home.startswith("torch.distributed")
    for shard, copy in gathered.values():
        if copy.shape != shard.shape or copy.dtype != shard.dtype:
            _refuse(f"`{name}`, which changes shape or dtype in place,", shard)
    for (shard, copy), before in zip(gathered.values(), versions, strict=True):
        if always or writes_so_far([copy]) != before:
            write_back(own_of(shard), cut_of(shard), copy)
    if target is not None:
        return target if name != "__setitem__" else result

    def out(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            items = [*map(out, value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, Tensor):
            value = without_graph(value, of)
            for shard, copy in gathered.values():
                if value is copy:
                    return shard  # written where it lies
                if shares_memory(value, copy):
                    return read_only(value, LEFT.format("{}", cut_of(shard).name))
        elif isinstance(value, numpy.ndarray):
            value.flags.writeable = False
        return value

    return out(result)


def _own_storage(name: str, shard: Tensor) -> Any:
    """What tells a shard apart from others: its memory as a storage of its own, of its own bytes. One without elements
    has a byte that stands for it, so that no rank takes two parameters for one."""
    if torch.compiler.is_exporting():
        raise RuntimeError(NOT_EXPORTED)
    with as_plain_tensors():
        cut = cut_of(shard)
        group = cut.group()
        own = own_of(shard)
        if not own.numel() and group is not None:
            own = group.stand_ins[cut.position : cut.position + 1]
        return own.data_ptr() if name == "data_ptr" else getattr(with_own_storage(own), name)()


def _refuse_beside(param: Tensor) -> NoReturn:
    raise RuntimeError(
        f"a thread beside the one that runs the model reads {cut_of(param).described()}, which FSDP gathers and frees "
        "meanwhile. Read parameters in the thread that trains, between steps."
    )


def _plainly(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with as_plain_tensors():
        return func(*args, **kwargs)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _shards_in(values: Iterable[Any]) -> Iterator[Tensor]:
    return (tensor for tensor in _tensors_in(values) if isinstance(tensor, Sharded))


def _reads_of(shard: Tensor) -> Asked | None:
    group = cut_of(shard).group()
    return None if group is None else group.reads()


def _unshard_to_read(values: Iterable[Any]) -> bool:
    """Collective within a forward. Returns whether it has unsharded any of the parameters among the values."""
    unsharded = False
    for param in _tensors_in(values):
        if isinstance(param, _AsParameter) and isinstance(param, nn.Parameter):
            reads = _reads_of(param)
            unsharded |= reads is not None and reads.unshard_for_reader(param)
    return unsharded


def _without_values(tensor: Any) -> bool:
    """Whether a state_dict() has a tensor of the full shape in place of a parameter's shard."""
    reads = _reads_of(tensor) if isinstance(tensor, _AsParameter) and isinstance(tensor, nn.Parameter) else None
    return reads is not None and reads.without_values


def _of_shape(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the shape of the full tensor answers."""
    tensor = args[0]
    if not isinstance(tensor, (Shard, _AsParameter)):
        return _plainly(func, args, kwargs)
    own: Any = tensor
    cut = cut_of(own)
    group = cut.group()
    if group is None or name == "element_size":
        return _plainly(func, args, kwargs)
    shape, strides = group.shapes.full[cut.position], group.shapes.strides[cut.position]
    if name == "shape":
        return shape
    if name in ("numel", "nelement"):
        return group.layout.numels[cut.position]
    reads = _reads_of(tensor) if isinstance(tensor, nn.Parameter) else None
    full = None if reads is None else reads.like(tensor)
    if full is None:
        with as_plain_tensors():
            full = torch.empty_strided(shape, strides, dtype=own.dtype, device="meta")
    return _plainly(func, [full, *args[1:]], kwargs)


def _load(shard: Any, value: Any) -> bool:
    """Whether this rank's elements of a full value were written into a shard, as full weights are loaded now."""
    if not isinstance(shard, Sharded) or not isinstance(shard, Tensor):
        return False
    cut, reads = cut_of(shard), _reads_of(shard)
    group = cut.group()
    return group is not None and reads is not None and reads.load(group, cut.position, shard, value)


def _spread_overflow(gradients: Sequence[Tensor], found: Tensor) -> None:
    """Collective. Tells all ranks what torch.amp.GradScaler has found in this rank's gradients."""
    shards = [*_shards_in(gradients)]
    for reads in dict.fromkeys(map(_reads_of, shards)):
        if reads is not None:
            reads.spread_overflow(found)
    for comm in ranks_of([cut_of(one) for one in shards if _reads_of(one) is None]):
        comm.all_reduce(found, maximum=True, channel=READ)


def _as_shards(result: Any, like: Any) -> Any:
    """Marks new tensors as shards: each of a list as its counterpart in the first argument of a function on lists."""
    if isinstance(result, (list, tuple)):
        likes = like if isinstance(like, (list, tuple)) else [like] * len(result)
        return type(result)([_as_shards(*pair) for pair in zip(result, likes, strict=False)])
    return like.with_elements(result) if type(result) is Tensor and isinstance(like, Sharded) else result


def _refuse(what: str, shard: Tensor) -> NoReturn:
    raise RuntimeError(
        f"{what} needs the full tensor, and was given a shard of {cut_of(shard).described()}, as between steps. Read "
        "it in the model's forward, or inside `with model.summon_full_params():`. See docs/when_it_fails.md."
    )


NOT_EXPORTED = (
    "torch.export traces a model of FSDP, which gathers and releases parameters. Export the plain module, which "
    "zero.unwrap(model) returns, or a copy into which zero.full_state_dict(model) is loaded."
)


class Sharded:
    """All classes below, and the gradients of stage 2."""

    __slots__ = ()  # else torch's classes could not be exchanged for these

    def own(self) -> Tensor:
        """This rank's elements, plain and without a graph."""
        own: Any = self
        with as_plain_tensors():
            return own.detach()  # type: ignore[no-any-return]

    def with_elements(self, own: Tensor) -> Tensor:
        """A tensor of the full shape of this one, of which this rank has other elements."""
        of: Any = self
        mark(own, cut_of(of))
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NO_COPIES)

    # torch does not ask __torch_function__ for these.
    def __float__(self) -> float:
        return float(self.item())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.item())  # type: ignore[attr-defined]

    def __index__(self) -> int:
        return int(self.item())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.item())  # type: ignore[attr-defined]

    def __repr__(self, **_: Any) -> str:
        tensor: Any = self
        return f"{type(self).__name__}({cut_of(tensor).described()}: {tensor.as_subclass(Tensor)!r})"


NO_COPIES = (
    "an FSDP cannot be copied or pickled: its parameters are spread over the ranks. Save full_state_dict(), or copy "
    "the module before wrapping it. For averages build AveragedModel(module) before, and then wrap the copy, "
    "too: average.module = zero.FSDP(average.module)."
)


class Shard(Sharded, Tensor):  # type: ignore[misc]
    """This rank's elements of a tensor that belongs to a sharded parameter. `cut`: which. A copy is a shard."""

    cut: Cut

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = self.detach().clone()
        return copy


class _AsParameter(Sharded):
    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(NO_COPIES)

    # Not through __torch_function__, which takes three times as long: every zero_grad() asks.
    @property
    def grad(self) -> Tensor | None:
        with as_plain_tensors():
            return GRADIENT.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        own: Any = self
        held = own.grad
        if type(held) is Tensor and gradient is not None and gradient is not held:
            _refuse(
                "a gradient that is assigned in place of the full one that a backward under no_sync() has left (write "
                "into that in place, or set it to None)",
                own,
            )
        if type(gradient) is Tensor and gradient.shape == own.shape and held is not gradient:
            gradient = _own_gradient(gradient, own)
        if gradient is not None and not (isinstance(gradient, Shard) and gradient.cut.matches(cut_of(own))):
            _refuse(
                "a gradient that is assigned as a plain tensor, of which nobody knows whether it is full or a shard "
                "(assign what is computed from param.grad or torch.zeros_like(param)),",
                own,
            )
        with as_plain_tensors():
            GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _own_gradient(gradient: Tensor, param: Any) -> Tensor:
    """This rank's elements of a full gradient, which is assigned."""
    with torch.no_grad():
        own = own_elements(gradient, param.own(), cut_of(param))
        assert own is not None
        own = own.clone()
    mark(own, cut_of(param))
    return own


class ShardedParameter(_AsParameter, nn.Parameter):  # type: ignore[misc]
    """A parameter whose data is this rank's shard."""


class _ShardedFake(_AsParameter, Fake):  # type: ignore[misc]
    """The same in a rehearsal (zero.plan), where parameters have no values."""


class _ShardedRebound(_AsParameter, Rebound):  # type: ignore[misc]
    """The same for parameters that are offloaded."""


class Lent(Tensor):
    """The memory of a full parameter, of which no graph keeps account. `cut`: of which one."""

    cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Sharded) for kind in types):
            return _dispatched(func, args, kwargs)  # which gathers that, and calls it once more
        if func.__name__ in ("__dlpack__", "to_dlpack"):
            raise RuntimeError(_FREED.format("a full parameter is handed to another library, which may keep it"))
        name, _, kind = kind_of(func)
        if kind not in (Kind.SILENT, Kind.SHAPE, Kind.OBJECT) or name in ("__repr__", "__format__"):
            refuse_freed((*args, *kwargs.values()))
        if not all(issubclass(kind, (Lent, nn.Parameter)) for kind in types):  # classes of the user's do what they do

            def plain(value: Any) -> Any:
                if isinstance(value, (list, tuple)):
                    return type(value)(map(plain, value))
                return plainly(value) if isinstance(value, Lent) else value

            return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        lent = next(one for one in _tensors_in((*args, *kwargs.values())) if isinstance(one, Lent))
        result = _plainly(func, args, kwargs)
        for one in result if isinstance(result, (list, tuple)) else [result]:
            if type(one) is Tensor and shares_memory(one, lent):
                one.__class__ = Lent
                vars(one)["cut"] = lent.cut
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plainly(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plainly(self).__deepcopy__(memo)


def plainly(lent: Tensor) -> Tensor:
    """The same memory as a plain tensor. Raises as `refuse_freed` does."""
    refuse_freed([lent])
    plain: Tensor = _plainly(Tensor.as_subclass, (lent, Tensor), {})
    return plain


def refuse_freed(values: Iterable[Any]) -> None:
    """Raises RuntimeError if any of the values is memory of a full parameter that is freed now: torch would read at
    address 0."""
    for one in _tensors_in(values):
        if isinstance(one, Lent):
            group = one.cut.group()
            if group is None or not group.lends:
                name = one.cut.described().partition(",")[0]
                raise RuntimeError(_FREED.format(f"{name} was kept, by a view or `.detach()`, and is read afterwards"))


_FREED = (
    "the memory of {}. FSDP releases it with its unit, when a forward or backward ends. Keep a copy: "
    "param.detach().clone()."
)


class FullParameter(nn.Parameter):
    """A parameter whose data is full until its unit is resharded. What shares its memory is Lent."""

    @property
    def data(self) -> Tensor:
        cut = of_param(self)  # None for a copy, which torch makes of this class
        group = None if cut is None else cut.group()
        if group is not None:
            group.data_was_read = True
        return self._lend(_DATA.__get__(self))  # type: ignore[no-any-return]

    @data.setter
    def data(self, data: Tensor) -> None:
        _DATA.__set__(self, data)

    def detach(self) -> Tensor:
        return self.data  # a write into it is not counted either

    def _lend(self, own: Any) -> Any:
        cut = of_param(self)
        group = None if cut is None else cut.group()
        reads = None if group is None else group.reads()
        if reads is not None and reads.beside:
            _refuse_beside(self)
        for one in () if cut is None else own if isinstance(own, (list, tuple)) else (own,):
            if type(one) is Tensor and shares_memory(one, self):
                one.__class__ = Lent
                vars(one)["cut"] = cut
        return own


def _lending(name: str) -> Any:
    own = getattr(nn.Parameter, name)
    if not callable(own):
        return property(lambda param: param._lend(own.__get__(param)))
    return lambda param, *args, **how: param._lend(own(param, *args, **how))


for _name in VIEWING:
    setattr(FullParameter, _name, _lending(_name))

_traced = False


def traced() -> bool:
    """Whether torch.compile has traced anything. It cannot trace such a class, so full parameters are plain from then
    on, and all that they hold is compared when they are released."""
    return _traced


def begin_tracing(params: Iterable[nn.Parameter]) -> None:
    """Called where torch.compile begins to trace. params: of which some may be full."""
    global _traced
    _traced = True
    for param in params:
        if type(param) is FullParameter:
            wake([param])


AT_REST: dict[type, type] = {nn.Parameter: ShardedParameter, Fake: _ShardedFake, Rebound: _ShardedRebound}
"""The class at rest, by the class of the full parameter. Parameters of other classes, such as quantised ones, stay."""

_FULL = {at_rest: full for full, at_rest in AT_REST.items()} | {FullParameter: nn.Parameter}

_DATA: Any = Tensor.data
_REQUIRES: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


GRADIENT: Any = Tensor.grad


def cut_of(tensor: Tensor) -> Cut:
    """Of which parameter a ShardedParameter or a Shard has this rank's elements."""
    # nn.Parameter(shard) is an nn.Parameter, but stays a Shard.
    registered = isinstance(tensor, (_AsParameter, FullParameter))
    found: Any = of_param(tensor) if registered else tensor.cut  # type: ignore[attr-defined]
    return found  # type: ignore[no-any-return]


def rest(params: Iterable[nn.Parameter]) -> None:
    """Makes parameters say that they are shards. Those that say so already stay."""
    for param in params:
        param.__class__ = AT_REST.get(type(param), type(param))


def wake(params: Iterable[nn.Parameter]) -> None:
    """Makes them plain parameters again."""
    for param in params:
        param.__class__ = _FULL.get(type(param), type(param))


def note_data(params: Iterable[nn.Parameter]) -> None:
    """Notes from here on where the data of full parameters is read, and perhaps written."""
    for param in () if _traced else params:
        if type(param) is nn.Parameter:
            param.__class__ = FullParameter


def mark(tensor: Tensor, cut: Cut) -> None:
    """Makes a plain tensor say that it is a shard. One without values stays what it is."""
    if type(tensor) is Tensor:
        tensor.__class__ = Shard
        vars(tensor)["cut"] = cut


def unmark(tensor: Tensor) -> None:
    """Makes a shard a plain tensor again, while an optimizer steps with it."""
    if type(tensor) is Shard:
        tensor.__class__ = Tensor  # type: ignore[assignment]


def mark_states(optimizer: Optimizer) -> None:
    """Makes tensors of an optimizer's state of parameters that are sharded now say that they are shards."""
    held = [(one, cut_of(one), state) for one, state in optimizer.state.items() if isinstance(one, _AsParameter)]
    mark_held(held, type(optimizer))


def mark_held(held: Sequence[tuple[Tensor, Cut, dict[Any, Any]]], kind: type) -> None:
    """The same of shards, which cut they are, and their state, in an optimizer of this class: tensors that have the
    shard's shape. Where this rank has one element of a parameter, a tensor of one element may be a single value of all
    ranks. Which ones are is known of torch's; of others it is, if the same entry of longer shards never has their
    shape."""
    with as_plain_tensors():
        shaped, single = set[Any](), set[Any](SINGLE if kind in ELEMENTWISE else ())
        for shard, _, state in held if not single and any(shard.numel() == 1 for shard, *_ in held) else ():
            for key, value in state.items() if shard.numel() > 1 else ():
                if isinstance(value, Tensor):
                    (shaped if value.shape == shard.shape else single).add(key)
        for shard, cut, state in held:
            others = single - shaped if single and shard.numel() == 1 else ()
            for key, value in state.items():
                is_like = type(value) is Tensor and value.shape == shard.shape and key not in others
                if is_like and (value.dim() or kind in ELEMENTWISE):
                    mark(value, cut)


def unmark_all(values: Iterable[Any]) -> list[tuple[Tensor, Cut]]:
    """Makes shards plain tensors among values and in lists, tuples and dictionaries of them. Returns these."""
    found: list[tuple[Tensor, Cut]] = []
    for value in values:
        if type(value) is Shard:
            found.append((value, value.cut))
            unmark(value)
        elif isinstance(value, (list, tuple)):
            found += unmark_all(value)
        elif isinstance(value, dict):
            found += unmark_all(value.values())
    return found


def plain_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of an optimizer's state of a parameter with the same memory, whose tensors are plain."""
    return {key: value.as_subclass(Tensor) if isinstance(value, Shard) else value for key, value in state.items()}
