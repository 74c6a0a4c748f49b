"""Tensors inside what a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with each tensor replaced; what holds no tensor is returned as it is, not as a copy."""
    if isinstance(value, Tensor):
        return function(value)
    if next(tensors_in(value), None) is None:
        return value
    if isinstance(value, dict):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped) if dataclasses.is_dataclass(value) else type(value)(mapped)
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: map_tensors(function, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    return value
