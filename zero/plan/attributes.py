"""A model's attributes, restored after it has run on tensors without values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_HOLDERS = (dict, list, set, deque)
_ENDS = (Tensor, ModuleType, type, str, bytes, int, float, complex, type(None))
"""Values that are not searched: they hold nothing that a forward would write into, or refer to too much else."""


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """On exit, restores what the module refers to: its attributes, and the objects, lists and dictionaries in them, at
    any depth. So masks and tables that a forward stores are dropped. Global variables are not restored."""
    before = [(holder, holder.copy()) for holder in _holders(module)]
    try:
        yield
    finally:
        for holder, held in before:
            if any(one is not other for one, other in zip_longest(_contents(holder), _contents(held))):
                holder.clear()
                (holder.extend if isinstance(holder, (list, deque)) else holder.update)(held)


def _holders(root: object) -> Iterator[Any]:
    """The dictionaries of attributes, and all mutable containers."""
    to_search: list[object] = [root]
    seen: set[_Identity] = set()
    while to_search:
        value = to_search.pop()
        if isinstance(value, _ENDS) or _Identity(value) in seen:
            continue
        seen.add(_Identity(value))
        if isinstance(value, _HOLDERS):
            yield value
        if isinstance(value, (*_HOLDERS, tuple)):
            to_search += _contents(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            to_search.append(attributes)


class _Identity:
    """An object's identity, for a set: the object itself may not be hashable, or may equal others."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __hash__(self) -> int:
        return object.__hash__(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value


def _contents(holder: Any) -> list[Any]:
    return [*holder, *holder.values()] if isinstance(holder, dict) else [*holder]


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules have as plain attributes, not as parameters or buffers, with their full names."""
    for prefix, holder in module.named_modules():
        for name, value in vars(holder).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}".lstrip("."), value
