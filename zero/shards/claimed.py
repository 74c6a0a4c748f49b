"""Parameters that a wrapper has, whose gradients nobody else may average."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter: a reference to whoever has it, and why nobody else may average its gradient."""


def claim(params: Iterable[nn.Parameter], owner: object, why: str) -> None:
    """Notes that `owner` has the parameters, as long as it exists or until `release`. why: for the user."""
    own = ref(owner)
    for param in params:
        _claims[param] = own, why


def release(params: Iterable[nn.Parameter], owner: object) -> None:
    for param in params:
        if param in _claims and _claims[param][0]() is owner:
            del _claims[param]


def claimed(param: nn.Parameter) -> tuple[object, str] | None:
    """Returns who has the parameter, and why nobody else may average its gradient; None if nobody has."""
    own, why = _claims.get(param, (None, ""))
    owner = None if own is None else own()
    return None if owner is None else (owner, why)
