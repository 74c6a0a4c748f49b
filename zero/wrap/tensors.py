"""Finds and replaces the tensors in a module's inputs and outputs, and finds the leaves of their graphs."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import Node

# Where backward goes on from a node, as `Node.next_functions`.
Edges: TypeAlias = tuple[tuple[Node | None, int], ...]

# Types of objects that are not searched for tensors.
_NOT_SEARCHED = (str, bytes, int, float, type, nn.Module, ModuleType, FunctionType, BuiltinFunctionType)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Returns all tensors in nested tuples, lists, sets, deques, dicts, dataclasses and attributes of other objects."""
    return (value,) if isinstance(value, Tensor) else _search(value)


def _search(value: Any) -> Iterator[Tensor]:
    seen: dict[
        int, Any
    ] = {}  # objects may refer to one another in cycles; it keeps them, so that none takes another's id
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not isinstance(value, _NOT_SEARCHED) and id(value) not in seen:
            seen[id(value)] = value
            stack += [*_children(value)][::-1]


def _children(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    attributes = [*vars(value).values()] if hasattr(value, "__dict__") else []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        attributes += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return [*attributes, *value.values()] if isinstance(value, Mapping) else attributes


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns a copy of the structure in which each tensor in tuples, lists, mappings and dataclasses is replaced.

    Objects in which nothing changes are returned themselves, not as copies: modules write into lists that they are
    given. So are objects of other types.
    """
    if isinstance(value, Tensor):
        return function(value)
    if next(_search(value), None) is None:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        present = [field for field in dataclasses.fields(value) if hasattr(value, field.name)]
        fields = {field.name: map_tensors(function, getattr(value, field.name)) for field in present}
        if all(item is getattr(value, name) for name, item in fields.items()):
            return value
        if isinstance(value, Mapping):
            return type(value)(**{field.name: fields[field.name] for field in present if field.init})
        replaced: Any = copy.copy(value)  # does not call __post_init__, which has run already
        for name, item in fields.items():
            object.__setattr__(replaced, name, item)  # works for frozen dataclasses, too
        return replaced
    if isinstance(value, MutableMapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        mapped = copy.copy(value)  # keeps the other attributes of the mapping, such as a default factory
        for key, item in changed.items():
            mapped[key] = item
        return mapped
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        if all(map(is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def nearest_leaf(edges: Edges) -> Node | None:
    """Returns the autograd node by which a backward along these edges accumulates the `grad` of the nearest leaf; None
    if it reaches no leaf."""
    nodes = deque(node for node, _ in edges if node is not None)
    seen = {*nodes}
    while nodes:
        node = nodes.popleft()
        if hasattr(node, "variable"):
            return node
        unseen = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(unseen)
        nodes += unseen
    return None
