"""Of which parameter, and of which shard group, a sharded parameter or a tensor made of it has this rank's elements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero.comm import Comm
from zero.shards.layout import Layout
from zero.shards.offload import Offload
from zero.shards.shapes import Shapes


class Asked(Protocol):
    """Who is asked when a sharded parameter is read (`Reads` in zero/fsdp/model.py).

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

    def load(self, group: Group, index: int, shard: Tensor, value: Tensor) -> bool:
        """While full weights are loaded, writes this rank's elements of a full value, and returns True."""

    def unshard_for_reader(self, param: nn.Parameter) -> bool:
        """Collective within forward and backward: unshards the parameter, and returns True. Returns False outside."""

    def spread_overflow(self, found: Tensor) -> None:
        """Collective. Makes it the largest of any rank."""


class Group(Protocol):
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

    group: ReferenceType[Group]
    position: int

    def matches(self, other: Cut) -> bool:
        """Whether every rank has the same elements of both."""
        if self == other:
            return True
        one, two = self.group(), other.group()
        if one is None or two is None or one.shapes.full[self.position] != two.shapes.full[other.position]:
            return False
        return [*one.layout.owners(self.position)] == [*two.layout.owners(other.position)]

    @property
    def name(self) -> str:
        """Of the parameter, for errors."""
        group = self.group()
        return "a parameter of an FSDP that is gone" if group is None else repr(group.names[self.position])

    def described(self) -> str:
        group = self.group()
        if group is None:
            return "a parameter of an FSDP that does not exist any more"
        span, full = group.shapes.spans.get(self.position), group.shapes.full[self.position]
        own = "none" if span is None else f"{span.start} to {span.stop}"
        elements = f"{full.numel()} elements in shape {list(full)}"
        return f"{group.names[self.position]!r}, of whose {elements} this rank has {own}"


# ------------------------------------------------------------------------------------------------- what has a parameter


def _nobody() -> None:
    return None


@dataclass(eq=False)
class Held:
    """Who has one parameter of the user's. All hold it weakly, and are asked by a call.

    cut: of the shard group that has it. averaged_by: the wrapper that has claimed it; `why` nobody else may average its
    gradient, and `sharded`, why nobody else may shard it, if that wrapper has.
    stepped_by: the OwnedShards that were made of it last. reduced_by: the Reducer that takes its gradients.
    half_sharded: whether an error has ended the construction of a model while it may have been a shard.
    """

    cut: Cut | None = None
    averaged_by: Callable[[], object | None] = _nobody
    why: str = ""
    sharded: str | None = None
    stepped_by: Callable[[], Any] = _nobody
    reduced_by: Callable[[], Any] = _nobody
    half_sharded: bool = False


# By identity: torch compares the elements of tensors that are keys of a WeakKeyDictionary.
_held: WeakIdKeyDictionary = WeakIdKeyDictionary()


def held(param: Tensor) -> Held:
    """Who has a parameter, to be read: torch exchanges no tensor to which a weak reference exists."""
    found: Held | None = _held.get(param)
    return Held() if found is None else found


def hold(param: Tensor) -> Held:
    """The same, to be written."""
    return _held.setdefault(param, Held())  # type: ignore[no-any-return]


_process = 0


def register(params: Sequence[nn.Parameter], group: Group) -> list[Cut]:
    """Notes that parameters are sharded by a shard group from now on. Returns the cut of each."""
    global _process
    _process = os.getpid()
    # Weak: a gradient that the user keeps has a cut, which would keep the model's buffers.
    cuts = [Cut(ref(group), index) for index in range(len(params))]
    for param, cut in zip(params, cuts, strict=True):
        hold(param).cut = cut
    return cuts


def process_of_shards() -> int:
    """The process that has sharded parameters: one that is forked from it has copies, and no other ranks."""
    return _process


def of_param(param: Tensor) -> Cut | None:
    """Where a parameter lies; None for one that is in no shard group."""
    return held(param).cut


def part_from(param: Tensor) -> None:
    """Notes that a parameter is in no shard group any more."""
    found: Held | None = _held.get(param)
    if found is not None:
        found.cut = None
        if vars(found) == vars(Held()):
            del _held[param]  # a weak reference, where torch.utils.swap_tensors() allows none


def claim(params: Iterable[nn.Parameter], owner: object, why: str, *, sharded: str | None = None) -> None:
    """Notes that `owner` has the parameters, as long as it exists or until `release`. why, sharded: for the user."""
    for param in params:
        of = hold(param)
        of.averaged_by, of.why, of.sharded = ref(owner), why, sharded


def take_over(params: Iterable[nn.Parameter]) -> None:
    """Ends what has taken the gradients of any of these parameters: they have another owner now."""
    for param in params:
        if (before := held(param).reduced_by()) is not None:
            before.retire()


def release(params: Iterable[nn.Parameter], owner: object) -> None:
    for param in params:
        # Another wrapper may have claimed the parameter since, and keeps it.
        if held(param).averaged_by() is owner:
            hold(param).averaged_by = _nobody


def refuse_sharded(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError if any of these parameters is sharded already."""
    for name, param in named:
        if held(param).sharded is not None and held(param).averaged_by() is not None:
            raise ValueError(f"{name} {held(param).sharded}")
