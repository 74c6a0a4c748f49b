"""Parameters that lie elsewhere than where a shard group has bound them: they were moved, cast or given other data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from zero._torch import as_plain_tensors

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
    with as_plain_tensors():
        pairs = enumerate(zip(params, views, strict=True))
        return [index for index, (param, view) in pairs if param.data_ptr() != view.data_ptr()]


def moved(group: Bound) -> str | None:
    """Returns the name of a parameter that lies elsewhere, if there is one."""
    return next((group.names[index] for index in elsewhere(group.params, group.bound)), None)


def moved_problem(groups: Iterable[Bound]) -> str | None:
    """Returns an error message if a parameter of these groups has different data, else None. Takes 0.1 ms for 258
    parameters."""
    name = next((name for group in groups if (name := moved(group)) is not None), None)
    return None if name is None else MOVED.format(name)


def take_back(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Writes data that a step has given its parameters (`p.data = ...`, by which some optimizers go back to earlier
    weights) to where it belongs, and binds the parameters to that again. They are plain ones. Data of another shape or
    on another device stays, and is refused later."""
    for index in elsewhere(params, views):
        given, view = params[index].data, views[index]
        if given.shape == view.shape and given.device == view.device:
            view.copy_(given)
            params[index].data = view
