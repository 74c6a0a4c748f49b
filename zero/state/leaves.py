"""Optimizer state as a flat dictionary of leaves: items of lists, tuples and dictionaries have keys of their own.

state     {"pair": [a, {"b": b}], "step": 3}
leaves    {"pair": Opened("list", (0, 1)), "pair\\n0": a, "pair\\n1": Opened("dict", ("b",)), "pair\\n1\\n0": b,
           "step": 3}
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero._torch.tensors import wraps_others

# Separates the key of a container from the number of an item.
_WITHIN = "\n"

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, torch.Size, dict)}


@dataclass(frozen=True)
class Opened:
    """A placeholder for a container, whose items are leaves of their own. keys: of a dictionary, otherwise numbers."""

    kind: str
    keys: tuple[str | int, ...]


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a state."""
    return {at: leaf for key, value in state.items() for at, leaf in _leaves(key, value)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if _KINDS.get(type(value).__name__) is not type(value) or not all(type(one) in (str, int) for one in _keys(value)):
        yield key, value
        return
    yield key, Opened(type(value).__name__, (*_keys(value),))
    for number, item in enumerate(value.values() if type(value) is dict else value):
        yield from _leaves(f"{key}{_WITHIN}{number}", item)


def _keys(value: Any) -> Any:
    return value if type(value) is dict else range(len(value))


def closed(leaves: dict[str, Any]) -> dict[str, Any]:
    """The state that has these leaves."""
    return {key: _entry(leaves, key) for key in leaves if _WITHIN not in str(key)}


def _entry(leaves: dict[str, Any], key: str) -> Any:
    value = leaves[key]  # not a closure that calls itself: the cycle would keep all tensors until garbage is collected
    if not isinstance(value, Opened):
        return value
    items = [_entry(leaves, f"{key}{_WITHIN}{number}") for number in range(len(value.keys))]
    return dict(zip(value.keys, items, strict=True)) if value.kind == "dict" else _KINDS[value.kind](items)


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


def copied_to(leaf: Any, device: torch.device | str | None) -> Any:
    """A copy of the leaf on a device, or where it is if that is None."""
    if not isinstance(leaf, Tensor):
        return deepcopy(leaf)
    if wraps(leaf):
        return moved(copied(leaf), device)
    return leaf.detach().to(leaf.device if device is None else device, copy=True)


def moved(leaf: Any, device: torch.device | str | None) -> Any:
    """The leaf on a device; as it is if that is None."""
    return leaf if device is None or not isinstance(leaf, Tensor) else leaf.to(device)


def all_described(leaves: dict[str, Any], of: str, what: str = "state") -> dict[str, dict[str, Any]]:
    """Leaves as JSON, by key. of, what: who has them, and what they are, for errors.

    Raises ValueError for what would come out as something else.
    """
    found = {}
    for key, leaf in leaves.items():
        if not isinstance(key, str):
            raise ValueError(f"{of} has {what} under {key!r}, which is no string")
        try:
            found[key] = _described(leaf)
        except ValueError as error:
            raise ValueError(f"the {what} {entry_of(key)!r} of {of} {error}") from None
    return found


def _described(leaf: Any) -> dict[str, Any]:
    """A tensor with dimensions as "shape", "dtype" and "device", anything else as its value."""
    if isinstance(leaf, Opened):
        return {"opened": [leaf.kind, leaf.keys]}
    if wraps(leaf):
        raise ValueError(f"is a {type(leaf).__name__}, a tensor that wraps others")
    if isinstance(leaf, Tensor):
        kind = {"dtype": str(leaf.dtype).removeprefix("torch."), "device": leaf.device.type}
        return {**kind, "shape": list(leaf.shape)} if leaf.dim() else {**kind, **_described(leaf.item())}
    value = leaf
    if isinstance(leaf, np.generic):
        value = leaf.item()
        if not isinstance(value, np.generic):  # as of those that Python has not
            return {"numpy": leaf.dtype.str, **_described(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is None or isinstance(value, int | float | str):
        return {"value": value}
    raise ValueError(f"is a {type(leaf).__qualname__}, neither a tensor nor a plain value")


def dtype_of(description: dict[str, Any]) -> torch.dtype:
    """The dtype of a tensor that was described."""
    return getattr(torch, description["dtype"])  # type: ignore[no-any-return]


def value_of(description: dict[str, Any]) -> Any:
    """The leaf from its description, if it is no tensor with dimensions."""
    if "opened" in description:
        kind, keys = description["opened"]
        return Opened(kind, tuple(keys))
    value = complex(*description["complex"]) if "complex" in description else description["value"]
    if "numpy" in description:
        return np.dtype(description["numpy"]).type(value)
    if "dtype" in description:
        return torch.tensor(value, dtype=dtype_of(description), device=description["device"])
    return value
