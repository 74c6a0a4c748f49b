"""Tensors inside what a module takes and returns, and the backward that they are in."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

_HOLD_NONE = (str, bytes, int, float, type, nn.Module, ModuleType, FunctionType, BuiltinFunctionType)
"""What is not searched for tensors."""


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Every tensor in nested tuples, lists, sets, deques, dicts, dataclasses, and attributes of other objects."""
    return (value,) if isinstance(value, Tensor) else _search(value)


def _search(value: Any) -> Iterator[Tensor]:
    seen: list[Any] = []  # objects may hold one another, in circles too
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not isinstance(value, _HOLD_NONE) and not any(value is one for one in seen):
            seen.append(value)
            waiting += [*_inside(value)][::-1]


def _inside(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    inside = [*vars(value).values()] if hasattr(value, "__dict__") else []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        inside += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return [*inside, *value.values()] if isinstance(value, Mapping) else inside


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with each tensor in tuples, lists, mappings and dataclasses replaced.

    What holds no tensor, and objects of other kinds, are returned as they are, not as copies.
    """
    if isinstance(value, Tensor):
        return function(value)
    if next(_search(value), None) is None:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        present = [field for field in dataclasses.fields(value) if hasattr(value, field.name)]
        fields = {field.name: map_tensors(function, getattr(value, field.name)) for field in present}
        if isinstance(value, Mapping):
            return type(value)(**{field.name: fields[field.name] for field in present if field.init})
        replaced: Any = copy.copy(value)  # without its __post_init__, which has run
        for name, item in fields.items():
            object.__setattr__(replaced, name, item)  # also of frozen ones
        return replaced
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)  # which keeps what a mapping has besides items, such as a default
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def nearest_leaf(tensor: Tensor) -> Node | None:
    """The node by which a backward from the tensor writes into the `grad` of some leaf, such as a parameter."""
    nodes = deque([get_gradient_edge(tensor).node])
    seen: set[Node] = set()
    while nodes:
        node = nodes.popleft()
        if hasattr(node, "variable"):
            return node
        following = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(following)
        nodes += following
    return None
