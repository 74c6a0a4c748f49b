"""Parameters that a wrapper has, whose gradients nobody else may average, and that nobody else may shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Claim(NamedTuple):
    """owner: who has the parameter. why: nobody else may average its gradient.

    sharded: why nobody else may shard it, if its owner has done that.
    """

    owner: ReferenceType[object]
    why: str
    sharded: str | None


# By parameter.
_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(params: Iterable[nn.Parameter], owner: object, why: str, *, sharded: str | None = None) -> None:
    """Notes that `owner` has the parameters, as long as it exists or until `release`. why, sharded: for the user."""
    made = Claim(ref(owner), why, sharded)
    for param in params:
        _claims[param] = made


def release(params: Iterable[nn.Parameter], owner: object) -> None:
    for param in params:
        # Another wrapper may have claimed the parameter since, and keeps it.
        if param in _claims and _claims[param].owner() is owner:
            del _claims[param]


def claimed(param: nn.Parameter) -> tuple[object, str] | None:
    """Returns who has the parameter, and why nobody else may average its gradient; None if nobody has."""
    found: Claim | None = _claims.get(param)
    owner = None if found is None else found.owner()
    return None if found is None or owner is None else (owner, found.why)


def refuse_sharded(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError if any of these parameters is sharded already."""
    for name, param in named:
        # Asked first: the claim of an owner that is gone stays in the table, and does not count.
        if claimed(param) is not None and _claims[param].sharded is not None:
            raise ValueError(f"{name} {_claims[param].sharded}")
