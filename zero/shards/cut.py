"""Of which parameter, and of which shard group, a sharded parameter or a tensor made of it has this rank's elements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero.comm import Comm
from zero.shards.layout import Layout
from zero.shards.offload import Offload
from zero.shards.shapes import Shapes


class Asked(Protocol):
    """Who is asked when a sharded parameter is read.

    without_values: whether a state_dict() now has tensors like the full parameters, without values, in place of shards.
    """

    @property
    def without_values(self) -> bool: ...

    @property
    def beside(self) -> bool:
        """Whether this thread is none of those in which the model runs now."""

    def like(self, param: nn.Parameter) -> Tensor | None:
        """A tensor without memory like the one as which a parameter is read now, if that is not the shard: within
        forward and backward, and while `without_values`."""

    def load(self, owner: Owner, index: int, shard: Tensor, value: Tensor) -> bool:
        """While full weights are loaded, writes this rank's elements of a full value, and returns True."""

    def unshard(self, param: nn.Parameter) -> bool:
        """Collective within forward and backward: unshards the parameter, and returns True. Returns False outside."""

    def spread_overflow(self, found: Tensor) -> None:
        """Collective. Makes it the largest of any rank."""


class Owner(Protocol):
    """What is read here of the shard group that has a parameter. reads: None while no model has the group.
    data_was_read: the memory of one of its full parameters, since they were gathered. lends: whether that is full now.
    read_channel: of the reading of one of its parameters between steps.
    stand_ins: on the CPU, a byte for each parameter, by whose address a shard without elements is told apart."""

    data_was_read: bool
    stand_ins: Tensor
    full: Tensor
    read_channel: int
    params: list[nn.Parameter]
    offload: Offload
    layout: Layout
    shapes: Shapes
    reads: Callable[[], Asked | None]

    @property
    def names(self) -> list[str]: ...

    @property
    def lends(self) -> bool: ...

    @property
    def comm(self) -> Comm: ...

    def own_slice(self, index: int, full: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Cut:
    """Of which parameter something is this rank's shard."""

    owner: ReferenceType[Owner]
    position: int

    def alike(self, other: Cut) -> bool:
        """Whether every rank has the same elements of both."""
        if self == other:
            return True
        one, two = self.owner(), other.owner()
        if one is None or two is None or one.shapes.full[self.position] != two.shapes.full[other.position]:
            return False
        return [*one.layout.owners(self.position)] == [*two.layout.owners(other.position)]

    @property
    def name(self) -> str:
        """Of the parameter, for errors."""
        owner = self.owner()
        return "a parameter of an FSDP that is gone" if owner is None else repr(owner.names[self.position])

    def described(self) -> str:
        owner = self.owner()
        if owner is None:
            return "a parameter of an FSDP that does not exist any more"
        span, full = owner.shapes.spans.get(self.position), owner.shapes.full[self.position]
        own = "none" if span is None else f"{span.start} to {span.stop}"
        elements = f"{full.numel()} elements in shape {list(full)}"
        return f"{owner.names[self.position]!r}, of whose {elements} this rank has {own}"


# By parameter.
_cuts: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(params: Sequence[nn.Parameter], owner: Owner) -> list[Cut]:
    """Notes that parameters are sharded by a shard group from now on. Returns the cut of each."""
    global _process
    _process = os.getpid()
    # Weak: a gradient that the user keeps has a cut, which would keep the model's buffers.
    cuts = [Cut(ref(owner), index) for index in range(len(params))]
    _cuts.update(zip(params, cuts, strict=True))
    return cuts


_process = 0


def process_of_shards() -> int:
    """The process that has sharded parameters: one that is forked from it has copies, and no other ranks."""
    return _process


def of_param(param: Tensor) -> Cut:
    """Of a parameter that was registered."""
    found: Cut = _cuts[param]
    return found


def find(param: Tensor) -> Cut | None:
    """Of any parameter."""
    found: Cut | None = _cuts.get(param)
    return found


def forget(params: Iterable[nn.Parameter]) -> None:
    """Ends `register`: the parameters are plain for good."""
    for param in params:
        _cuts.pop(param, None)


# --------------------------------------------------------------------------------------------------------------- claims
#
# Parameters that a wrapper has, whose gradients nobody else may average, and that nobody else may shard.


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
