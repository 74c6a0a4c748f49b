"""What users call on a model and its optimizers, schedulers and scaler, seen before it runs, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

METHODS = {
    "step": True,
    "unscale_": True,
    "clip_grad_norm": True,
    "clip_grad_norm_": True,
    "reduce": True,
    "sync_buffers": True,
    "update": False,
    "zero_grad": False,
}
"""What ranks without data do along, and whether it may send something."""


def sends(one: object, name: str) -> bool:
    """Whether the method may send something."""
    return METHODS[name] and not isinstance(one, LRScheduler)


def replace(one: Any, name: str, told: Callable[..., Any]) -> Callable[[], None]:
    """Has the method `name` call `told` with the method before its arguments. Returns what puts it back."""
    original, before = getattr(one, name), vars(one).get(name)

    @wraps(original)  # with the marks that schedulers leave on a step
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return told(original, *args, **kwargs)

    vars(one)[name] = replaced = MethodType(method, one)

    def put_back() -> None:
        if vars(one).get(name) is replaced:  # and not what a scheduler has put around it since
            del vars(one)[name]
            vars(one).update({} if before is None else {name: before})

    return put_back


def as_plain(value: Any, known: Sequence[object]) -> Any:
    """An argument as JSON can tell it, of `known` by their place. Raises TypeError for what it cannot."""
    for place, one in enumerate(known):
        if value is one:
            return {"place": place}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__}, of which ranks without data cannot be told. Inside zero.join call step() without a "
        "closure, after backward, and give other methods numbers."
    )


def from_plain(value: Any, known: Sequence[object]) -> Any:
    return known[value["place"]] if isinstance(value, dict) else value
