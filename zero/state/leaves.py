"""Optimizer state as a flat dictionary of leaves: items of lists, tuples and dictionaries have keys of their own.

state     {"pair": [a, {"b": b}], "step": 3}
leaves    {"pair": Opened("list", (0, 1)), "pair\\n0": a, "pair\\n1": Opened("dict", ("b",)), "pair\\n1\\n0": b,
           "step": 3}
"""

from __future__ import annotations

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
    """The leaves of a state: containers before their items."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found[key] = value
        if type(value) in _KINDS.values():
            keys = tuple(value) if type(value) is dict else (*range(len(value)),)
            if all(type(one) in (str, int) for one in keys):
                found[key] = Opened(type(value).__name__, keys)
                items = value.values() if type(value) is dict else value
                found |= opened({f"{key}{_WITHIN}{number}": item for number, item in enumerate(items)})
    return found


def closed(leaves: dict[str, Any]) -> dict[str, Any]:
    """The state that has these leaves."""
    found = {**leaves}
    for key, value in reversed(leaves.items()):  # the items of a container are closed before it is
        if isinstance(value, Opened):
            items = [found.pop(f"{key}{_WITHIN}{number}") for number in range(len(value.keys))]
            is_dict = value.kind == "dict"
            found[key] = dict(zip(value.keys, items, strict=True)) if is_dict else _KINDS[value.kind](items)
    return found


def entry_of(key: str) -> str:
    """The key of the state entry that a leaf belongs to."""
    return key.partition(_WITHIN)[0]


def copied(leaf: Any, device: torch.device | str | None = None) -> Any:
    """A copy of a leaf on a device, or where it is if that is None."""
    if not isinstance(leaf, Tensor):
        return deepcopy(leaf)
    if not wraps_others(leaf):
        return leaf.detach().to(leaf.device if device is None else device, copy=True)
    wrapper: Any = leaf  # not every such class has a clone, but all can be flattened
    names, context = wrapper.__tensor_flatten__()
    inner = {name: copied(getattr(wrapper, name)) for name in names}
    made = type(wrapper).__tensor_unflatten__(inner, context, leaf.size(), leaf.stride())
    return made if device is None else made.to(device)


def all_described(leaves: dict[str, Any], of: str, what: str = "state") -> dict[str, dict[str, Any]]:
    """Leaves as JSON, by key. Raises ValueError for what would come out as something else. of, what: who has them, and
    what they are."""
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
    if isinstance(leaf, Tensor):
        if wraps_others(leaf):
            raise ValueError(f"is a {type(leaf).__name__}, a tensor that wraps others")
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


def value_of(description: dict[str, Any], device: torch.device | None = None) -> Any:
    """The leaf from its description. Of a tensor with dimensions an empty one, on a device."""
    if "opened" in description:
        kind, keys = description["opened"]
        return Opened(kind, tuple(keys))
    if "shape" in description:
        return torch.empty(description["shape"], dtype=dtype_of(description), device=device)
    value = complex(*description["complex"]) if "complex" in description else description["value"]
    if "numpy" in description:
        return np.dtype(description["numpy"]).type(value)
    if "dtype" in description:
        return torch.tensor(value, dtype=dtype_of(description), device=description["device"])
    return value
