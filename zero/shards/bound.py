"""Parameters bound to views of a shard group's memory, and which of them lie elsewhere since: they were moved, cast or
given other data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch.tensors import as_plain_tensors
from zero.shards.cut import Owner, register
from zero.shards.sharded_parameter import GRADIENT, mark, rest, wake

MOVED = (
    "{!r} was moved, cast or given other data (`p.data = ...`) since it was sharded, and would lose it at the next "
    "all-gather. Write in place: `p.data.copy_(...)`, or `p.copy_(...)` under torch.no_grad(). Move and cast the model "
    "before wrapping it."
)


class BoundParams:
    """The parameters of a shard group, whose data are views of its memory.

    owner: the shard group. names: of the parameters in error messages.
    says_so: whether they say that they are shards while they are (sharded_parameter.py).
    `views`: what they are bound to. `cuts`: of which parameter each one's shard is.
    """

    def __init__(self, owner: Owner, params: Sequence[nn.Parameter], names: Sequence[str], *, says_so: bool) -> None:
        self.params, self.names, self.says_so = params, [*names], says_so
        self.views: Sequence[Tensor] = ()
        self.cuts = register(self.params, owner)
        self._leaves: list[Any] = []

    def bind(self, views: Sequence[Tensor], *, sharded: bool) -> None:
        """sharded: whether they are shards then."""
        self.views = views
        wake(self.params)  # torch's own data is set
        for param, view in zip(self.params, views, strict=True):
            param.data = view
        if sharded and self.says_so:
            rest(self.params)

    def moved(self) -> str | None:
        """Returns the name of a parameter that lies elsewhere than where it was bound, if there is one."""
        return next((self.names[index] for index in elsewhere(self.params, self.views)), None)

    def set_gradient(self, index: int, gradient: Tensor | None) -> None:
        """Makes it the gradient of the shard of a parameter that is sharded."""
        if gradient is not None and self.says_so:
            mark(gradient, self.cuts[index])
        with as_plain_tensors():
            GRADIENT.__set__(self.params[index], gradient)

    def keep_leaves(self) -> None:
        """Called while the parameters are full: a Function of the user's that reads parameters of another unit records
        them before it reads, and a node that was made then would expect gradients of the shard's shape."""
        # In inference mode a parameter has no node, and get_gradient_edge fails.
        if self.says_so and not torch.is_inference_mode_enabled():
            trained = [param for param in self.params if param.requires_grad]
            # torch itself holds a leaf's node weakly: without the list the next one has the shape of the shard.
            self._leaves = [torch.autograd.graph.get_gradient_edge(param).node for param in trained]

    def forget_leaves(self) -> None:
        """A node accumulates on the stream on which it was made, which may be another than now."""
        self._leaves = []


def elsewhere(params: Iterable[Tensor], views: Iterable[Tensor]) -> list[int]:
    """Returns the positions of the parameters that do not lie where the views do. Compares addresses only."""
    with as_plain_tensors():  # six times a step for each unit: lists of addresses take 0.7 of a loop over the pairs
        here, there = [*map(Tensor.data_ptr, params)], [*map(Tensor.data_ptr, views)]
    if here == there:
        return []
    return [index for index, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]


def refuse_moved(bound: Iterable[BoundParams]) -> None:
    """Raises RuntimeError if one of these parameters has different data. Takes 0.1 ms for 258 parameters."""
    for one in bound:
        if (name := one.moved()) is not None:
            raise RuntimeError(MOVED.format(name))


def take_back(params: Sequence[Tensor], views: Sequence[Tensor], held: Iterable[Any]) -> None:
    """Writes data that a step has given its parameters (`p.data = ...`, by which some optimizers go back to earlier
    weights) to where it belongs, and binds the parameters to that again. They are plain ones. Data of another shape or
    on another device stays, and is refused later.

    held: what the optimizer holds. Where that is the memory from before, it gets memory of its own.
    """
    given = {index: params[index].data for index in elsewhere(params, views)}
    fits = [at for at, data in given.items() if (data.shape, data.device) == (views[at].shape, views[at].device)]
    if not fits:
        return
    overwritten = {views[at].untyped_storage().data_ptr() for at in fits}
    for tensor in _tensors_in(held):
        if tensor.untyped_storage().data_ptr() in overwritten and not any(tensor is param for param in params):
            tensor.data = tensor.detach().clone()
    # All are copied before any is written: a step may have swapped the data of two parameters.
    for at, data in [(at, given[at].clone()) for at in fits]:
        views[at].copy_(data)
        params[at].data = views[at]


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
