"""What stands in `param.grad`, if it is no plain tensor.

At stage 1 it is a WideAverage where 16 bits are averaged in float32. At stage 2, where a gradient lives with its
owners, it is the truth as with DistributedDataParallel:

    an OwnedGradient    has this rank's shard. It counts in the next step and is added to by the next backward, also
                        after it was taken away and put back, or computed of another one
    None                the gradient was dropped
    a plain tensor      autograd has written a full gradient that is not reduced yet
    anything else       is refused
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero._torch.autograd import in_a_backward
from zero._torch.tensors import WithoutMemory, as_plain_tensors, foreach, tree_iter
from zero.comm.oplog import READ
from zero.shards.answers import FINITE_CHECK, Kind, in_place, kind_of, norm_of, order_of, ranks_of, settled
from zero.shards.cut import Cut
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import Sharded

# ------------------------------------------------------------------------------------------------------------- refusals
#
# Gradients that no stage takes.


CREATE_GRAPH = (
    "the gradient of {} is itself part of a graph (create_graph=True), but a reduced gradient cannot be "
    "differentiated. Compute inner derivatives by torch.autograd.grad(..., create_graph=True), and call backward() "
    "without create_graph."
)


def refuse_sparse(name: str) -> NoReturn:
    """Raises RuntimeError for the sparse gradient of the parameter of this name."""
    raise RuntimeError(f"{name} has a sparse gradient. zero shards dense ones: build the embedding with sparse=False.")


# ------------------------------------------------------------------------------------------------------------ gradients


# Operators that leave it as it is, and those that clear the shard.
_KEPT, _CLEARED = {"detach", "alias"}, {"zero_", "_foreach_zero_"}


class OwnedGradient(Sharded, WithoutMemory):
    """The gradient of one parameter, of which each rank has a shard; or what is computed of it element by element. It
    has no memory in its own shape, and answers as the full gradient (zero/shards/answers.py).

    `cut`: of which parameter, and which elements of it this rank has. `shard`: these; empty where it has none.
    `unreduced`: the full gradient of backwards since, under no_sync; None if there were none.
    """

    cut: Cut
    shard: Tensor
    unreduced: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, cut: Cut, shard: Tensor, **cast: Any) -> OwnedGradient:
        with as_plain_tensors():
            made = cls.like(like, **cast)
        made.cut, made.shard, made.unreduced = cut, shard, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CLEARED or (name == "to" and any(isinstance(one, torch.device) for one in args[1:])):
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if name == "__get__" and func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return args[0].shard.dtype  # that of the masters, where the parameter is narrower
        if name == "__set__" and func == Tensor.data.__set__:  # type: ignore[attr-defined]
            of, data = args
            if not isinstance(data, OwnedGradient) or not data.cut.matches(of.cut):
                raise RuntimeError(
                    f"`.data` of the gradient of {of.cut.name} was set to a {type(data).__name__}. {OWN_ONLY}"
                )
            of.shard, of.unreduced = data.own(), None
            return None
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch itself does: accumulates, clears, moves and casts."""
        operator, first = func.overloadpacket.__name__, args[0]
        if operator in _KEPT:
            return first
        if operator == "_to_copy":  # the module is moved or cast: the step refuses that in its own words
            cast = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device") and value}
            return cls(first, first.cut, first.shard, **cast)
        if operator in _CLEARED:
            for one in first if isinstance(first, (list, tuple)) else [first]:
                one._clear() if isinstance(one, cls) else one.zero_()
            return first if operator == "zero_" else None
        if operator in ("add_", "add") and isinstance(first, cls) and in_a_backward():
            addend, alpha = args[1], (kwargs or {}).get("alpha", 1)
            return first._receive(addend if alpha == 1 else addend * alpha, in_place=operator == "add_")
        raise RuntimeError(
            f"{operator} was called by torch itself on the gradient of {args[0].cut.name}, of which each rank has a "
            "shard at stage 2. Call torch's function on `param.grad`."
        )

    def _receive(self, gradient: Tensor, *, in_place: bool) -> OwnedGradient:
        """Takes what autograd adds, and does not write into it: others may hold it."""
        if not in_place:  # autograd adds so if the gradient is to have a graph
            raise RuntimeError(CREATE_GRAPH.format(self.cut.name))
        self.unreduced = gradient if self.unreduced is None else self.unreduced + gradient
        return self

    def own(self) -> Tensor:
        if self.unreduced is not None:
            raise RuntimeError(
                f"the gradient of {self.cut.name} was accumulated under no_sync(), and is not reduced yet. Read it "
                "after a backward outside of no_sync(), or call reduce()."
            )
        return self.shard

    def with_elements(self, own: Tensor) -> OwnedGradient:
        # torch takes one as `param.grad` by the dtype of the parameter, which may be narrower.
        return OwnedGradient(self, self.cut, own, dtype=None if own.dtype == self.shard.dtype else own.dtype)

    def refuse_of_others(self, group: ShardGroup, index: int) -> None:
        """Raises RuntimeError unless it is of the parameter of this index, in whose `param.grad` it stands."""
        if self.cut.group() is not group or self.cut.position != index:
            raise RuntimeError(f"{group.names[index]} has the gradient of {self.cut.name} in `param.grad`. {OWN_ONLY}")

    def _clear(self) -> None:
        self.unreduced = None
        self.shard.zero_()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            f"the gradient of {self.cut.name} is spread over the ranks, and cannot be pickled. Save param.grad.clone() "
            "of stage 1, or gather it on every rank: param.grad.cpu().numpy()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = self.with_elements(self.own().clone())
        return copy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with as_plain_tensors():
            return f"OwnedGradient({self.cut.name}, {list(self.shape)}, {self.dtype}, sharded by ShardedDDP)"


OWN_ONLY = (
    "With ShardedDDP `param.grad` is None, or what backward has left there, or what is computed of it element by "
    "element. To change a gradient write into it (`param.grad.mul_(...)`), or change it in a hook on the parameter."
)


@dataclass
class Wide:
    """This rank's elements of an average in float32, in the shape of the shard. narrow: what the average itself had
    there when it was last computed with; None if that is what these are rounded to."""

    wide: Tensor
    narrow: Tensor | None = None


class WideAverage(Tensor):
    """A full average of 16 bits, the same on every rank, of which this rank has its elements in float32 as well. `own`:
    these, of the shard `cut`. They are stepped in place of the rounded elements, except of those that were written.

    What is computed of it element by element and with numbers, as clipping and loss scaling do, is computed of both,
    also of its `.data` and `.detach()`. Its norms are those of float32, by all ranks, and so is its dtype, which
    torch.amp.GradScaler asks for. All else reads and writes the full one.
    """

    cut: Cut
    own: Wide

    def settled(self) -> Tensor:
        """The float32 elements, with what was written into the full average otherwise. Called where tensors are
        plain, before a function writes into that."""
        group, held = self.cut.group(), self.own
        if group is not None and held.wide.numel():
            own = group.own_slice(self.cut.position, self)
            narrow = held.wide.to(own.dtype) if held.narrow is None else held.narrow
            same = own.view(torch.int16) == narrow.view(torch.int16)  # bits: NaN is unlike itself
            torch.where(same, held.wide, own.to(held.wide.dtype), out=held.wide)  # no second one: all have one buffer
            held.narrow = None if held.narrow is None else own.clone()
        return held.wide

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (name, word, kind), kwargs = kind_of(func), kwargs or {}
        with as_plain_tensors():
            if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
                return args[0].own.wide.dtype
            if name == "detach_":
                return args[0]  # it has no graph, and torch refuses views, as an average may be one
            if func in (Tensor.data.__get__, Tensor.detach):  # type: ignore[attr-defined]
                return as_wide_average(func(*args), args[0].cut, args[0].own)
            of = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
            full: list[Any] = [one for one in of if isinstance(one, cls)]
            if kind is Kind.NORM and full and (order := order_of(name, args, kwargs)) is not None:
                norms = [
                    norm_of(one, one.settled(), one.cut, order, name, None) if isinstance(one, cls) else one.norm(order)
                    for one in of
                ]
                return norms if of is args[0] else settled(norms[0]) if name == "norm" else norms[0]
            with_numbers = not any(isinstance(one, Tensor) and one.dim() for one in tree_iter([args[1:], kwargs]))
            if kind is not Kind.ELEMENTWISE or not with_numbers or not full:
                return func(*args, **kwargs)
            if of is not args[0]:
                wide = func(full[0].settled(), *args[1:], **kwargs)  # first: it looks at what the full one has now
                result = func(*args, **kwargs)
                if not in_place(name) and type(result) is Tensor and result.dtype == full[0].dtype:
                    full = [as_wide_average(result, args[0].cut, Wide(wide))]
            else:
                func([one.settled() if isinstance(one, cls) else one for one in of], *args[1:], **kwargs)
                where = [number for number, one in enumerate(of) if isinstance(one, cls)]
                beside = [[one[at] for at in where] if isinstance(one, (list, tuple)) else one for one in args[1:]]
                result = None if word == FINITE_CHECK else func(full, *beside)
                if word == FINITE_CHECK:
                    foreach("mul_", full, [args[2]] * len(full))
                for comm in ranks_of([one.cut for one in full]) if word == FINITE_CHECK else ():
                    comm.all_reduce(args[1], maximum=True, channel=READ)
            for one in full:
                group = one.cut.group()
                if group is not None and one.own.wide.numel():
                    one.own.narrow = group.own_slice(one.cut.position, one).clone()
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = self.clone()
        return copy


def as_wide_average(average: Any, cut: Cut, own: Wide) -> WideAverage:
    """Makes a plain tensor one."""
    average.__class__ = WideAverage
    average.cut, average.own = cut, own
    return average  # type: ignore[no-any-return]


def held_here(gradient: Tensor | None) -> Tensor | None:
    """What this rank has in memory of a gradient."""
    return gradient.shard if isinstance(gradient, OwnedGradient) else gradient


def refuse_left(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a parameter with a gradient that an earlier ShardedDDP has left there."""
    for name, param in named:
        if isinstance(param.grad, OwnedGradient):
            raise ValueError(
                f"{name!r} has a gradient of a ShardedDDP that has the model already, as in a notebook whose cell runs "
                "again. Wrap what zero.unwrap(model) of that one returns, or clear the gradients first: "
                "module.zero_grad()."
            )
