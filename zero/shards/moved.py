"""Parameters that lie elsewhere than where a shard group has bound them: they were moved, cast or given other data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from zero._torch.tensors import as_plain_tensors

MOVED = (
    "{!r} was moved, cast or given other data (`p.data = ...`) since it was sharded, and would lose it at the next "
    "all-gather. Write in place: `p.data.copy_(...)`, or `p.copy_(...)` under torch.no_grad(). Move and cast the model "
    "before wrapping it."
)


class Bound(Protocol):
    """What is read here of a shard group. bound: the views that are the parameters' data."""

    params: list[nn.Parameter]
    names: list[str]
    bound: Sequence[Tensor]


def elsewhere(params: Iterable[Tensor], views: Iterable[Tensor]) -> list[int]:
    """Returns the positions of the parameters that do not lie where the views do. Compares addresses only."""
    with as_plain_tensors():  # six times a step for each unit: lists of addresses take 0.7 of a loop over the pairs
        here, there = [*map(Tensor.data_ptr, params)], [*map(Tensor.data_ptr, views)]
    if here == there:
        return []
    return [index for index, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]


def moved(group: Bound) -> str | None:
    """Returns the name of a parameter that lies elsewhere, if there is one."""
    return next((group.names[index] for index in elsewhere(group.params, group.bound)), None)


def moved_problem(groups: Iterable[Bound]) -> str | None:
    """Returns an error message if a parameter of these groups has different data, else None. Takes 0.1 ms for 258
    parameters."""
    name = next((name for group in groups if (name := moved(group)) is not None), None)
    return None if name is None else MOVED.format(name)


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
