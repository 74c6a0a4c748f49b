"""Optimizer state as a flat dictionary of leaves: items of lists and tuples have keys of their own.

state     {"pair": [a, (b,)], "step": 3}
leaves    {"pair": Opened("list", 2), "pair\\n0": a, "pair\\n1": Opened("tuple", 1), "pair\\n1\\n0": b, "step": 3}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero._torch import wraps_others

_WITHIN = "\n"
"""Separates the key of a list from the number of an item."""


@dataclass(frozen=True)
class Opened:
    """A placeholder for a list or tuple, whose items are leaves of their own."""

    kind: str
    length: int


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a state."""
    return {at: leaf for key, value in state.items() for at, leaf in _leaves(key, value)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        yield key, Opened(type(value).__name__, len(value))
        for number, item in enumerate(value):
            yield from _leaves(f"{key}{_WITHIN}{number}", item)
    else:
        yield key, value


def closed(leaves: dict[str, Any]) -> dict[str, Any]:
    """The state that has these leaves."""
    return {key: _entry(leaves, key) for key in leaves if _WITHIN not in key}


def _entry(leaves: dict[str, Any], key: str) -> Any:
    value = leaves[key]  # not a closure that calls itself: the cycle would keep all tensors until garbage is collected
    if not isinstance(value, Opened):
        return value
    items = [_entry(leaves, f"{key}{_WITHIN}{number}") for number in range(value.length)]
    return items if value.kind == "list" else tuple(items)


def entry_of(key: str) -> str:
    """The key of the state entry that a leaf belongs to."""
    return key.partition(_WITHIN)[0]


def wraps(leaf: Any) -> bool:
    """Whether a leaf is a tensor that wraps others (quantised, DTensor): only its class can join shards of it."""
    return isinstance(leaf, Tensor) and wraps_others(leaf)


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor. Not every class that wraps tensors has a clone, but all can be flattened."""
    if not wraps(tensor):
        return tensor.clone()
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    inner = {name: copied(getattr(tensor, name)) for name in names}
    return type(wrapper).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[no-any-return]


def described(leaf: Any) -> dict[str, Any]:
    """A leaf as JSON: a tensor with dimensions as "shape", "dtype" and "device", anything else as its value."""
    if isinstance(leaf, Opened):
        return {"opened": [leaf.kind, leaf.length]}
    if not isinstance(leaf, Tensor):
        return {"value": leaf}
    description = {"dtype": str(leaf.dtype).removeprefix("torch."), "device": leaf.device.type}
    return {**description, "shape": list(leaf.shape)} if leaf.dim() else {**description, "value": leaf.item()}


def dtype_of(description: dict[str, Any]) -> torch.dtype:
    """The dtype of a tensor that was described."""
    return getattr(torch, description["dtype"])  # type: ignore[no-any-return]


def value_of(description: dict[str, Any]) -> Any:
    """The leaf from its description, if it is no tensor with dimensions."""
    if "opened" in description:
        return Opened(*description["opened"])
    if "dtype" in description:
        return torch.tensor(description["value"], dtype=dtype_of(description), device=description["device"])
    return description["value"]
