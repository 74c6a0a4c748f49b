"""The methods that users call on a model, its optimizers, schedulers and scaler: intercepted, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from zero.measure.param_groups import options

METHODS = {
    "step": True,
    "unscale_": True,
    "clip_grad_norm": True,
    "clip_grad_norm_": True,
    "grad_norm": True,
    "reduce": True,
    "sync_buffers": True,
    "update": False,
    "zero_grad": False,
}
"""The methods that ranks without data call too, and whether they may send something."""


def sends(one: object, name: str) -> bool:
    """Whether the method may send something."""
    return METHODS[name] and not isinstance(one, LRScheduler)


def replace(one: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replaces the method `name` by the function, whose first argument is the method. Returns what undoes this."""
    original, before = getattr(one, name), vars(one).get(name)

    @wraps(original)  # with the marks that schedulers set on a step
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    vars(one)[name] = replaced = MethodType(method, one)

    def restore() -> None:
        if vars(one).get(name) is replaced:  # a scheduler may have wrapped it since
            del vars(one)[name]
            vars(one).update({} if before is None else {name: before})

    return restore


def as_plain(value: Any, known: Sequence[object]) -> Any:
    """An argument as JSON; an object in `known` by its place there. Raises TypeError for others."""
    for place, one in enumerate(known):
        if value is one:
            return {"place": place}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__}, which cannot be sent to ranks without data. Inside zero.join call step() without a "
        "closure, after backward, and give other methods numbers."
    )


def from_plain(value: Any, known: Sequence[object]) -> Any:
    return known[value["place"]] if isinstance(value, dict) else value


def plain_options(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of the groups that JSON can hold."""
    found = []
    for group in param_groups:
        values = {key: value.item() if _is_number(value) else value for key, value in options(group).items()}
        found.append({key: value for key, value in values.items() if _is_plain(value)})
    return found


def take_options(group: dict[str, Any], given: dict[str, Any]) -> None:
    """Sets the options of the group to those of another rank, from `plain_options`."""
    for key, value in given.items():
        if _is_number(group.get(key)):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_plain(value: object) -> bool:
    several = isinstance(value, tuple) and all(map(_is_plain, value))
    return several or value is None or isinstance(value, (bool, int, float, str))
