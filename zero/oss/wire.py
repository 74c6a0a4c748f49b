"""What all users of one process group share: the numbers of operations, their order, and whether they still can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero.oss.handle import Handle
from zero.oss.neighbours import Neighbours

_BITS = 31
"""Of the number of an operation; the rest are those of what is announced to follow it."""

COMPARISON, SUM, BROADCAST, COLLECTION, GATHER, REDUCTION = range(6)
"""Operations that every process group knows."""


class Wire:
    """queue: the transfers in flight that are to be completed in the order in which they were launched.

    announced: the channel of what follows the operations to come.
    broken: why nothing more can be sent.
    stranded: buffers of transfers that failed, into which messages may still be written.
    neighbours: the ranks, where they read one another's memory; whether they do is not known before they `have_met`.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self.queue: list[Handle] = []
        self.announced = 0
        self.broken: str | None = None
        self.stranded: list[Any] = []
        self.neighbours: Neighbours | None = None
        self.have_met = False
        self._names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a collection",
            "a gather",
            "a reduction",
        ]

    def channel(self, name: str) -> int:
        self._names.append(name)
        return len(self._names) - 1

    def number(self, channel: int) -> int:
        """What is told of an operation: which it is, and what was announced to follow it."""
        return channel + (self.announced << _BITS)

    def name(self, number: int) -> str:
        """What an operation is called, and what was announced to follow it."""
        announced, channel = divmod(number, 1 << _BITS)
        name = self._names[channel] if channel < len(self._names) else f"operation number {channel}"
        return f"{name} (next: {self._names[announced]})" if 0 < announced < len(self._names) else name

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(f"{self.broken} Start the process group anew before going on.")

    def refuse_others(self, number: int, numbers: Mapping[int, int]) -> None:
        """numbers: by rank, of the operation that each other rank has come to; `number` is this rank's."""
        different = [peer for peer, theirs in numbers.items() if theirs != number]
        if different:
            peers = ", ".join(f"rank {peer} in {self.name(numbers[peer])}" for peer in different)
            self.broken = (
                f"ranks are out of step: rank {self._rank} is in {self.name(number)}, but {peers}. All ranks "
                "must run the same modules in the same order and take the same steps. Modules that ranks choose "
                "between must be gathered together: FSDP(as_one_unit=...)."
            )
            raise RuntimeError(self.broken)

    def in_vain(self, number: int | None, buffers: object) -> _InVain:
        """Explains the error of a transfer, and keeps its buffers alive: they may still be written into, or read."""
        return _InVain(self, number, buffers)

    def give_up(self, number: int | None, buffers: object, error: BaseException) -> str:
        """After the error of a transfer. Returns what is told of it."""
        self.stranded.append(buffers)
        where = "a transfer" if number is None else self.name(number)
        told = (
            f"rank {self._rank} waited in vain in {where}: another rank of the group of {self._world} has stopped, "
            f"or never came here. Look for the first error of any rank. ({error})"
        )
        if self.neighbours is not None:  # they wait for this rank to read: now it will not
            self.neighbours.close()
            self.broken = told
        return told


class _InVain:
    """A context. Not a generator, which takes three times as long: every transfer enters a few."""

    __slots__ = ("_buffers", "_number", "_wire")

    def __init__(self, wire: Wire, number: int | None, buffers: object) -> None:
        self._wire, self._number, self._buffers = wire, number, buffers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            told = self._wire.give_up(self._number, self._buffers, error)
            if isinstance(error, (RuntimeError, OSError)):  # not Ctrl-C
                raise RuntimeError(told) from error


_wires: WeakKeyDictionary[dist.ProcessGroup, Wire] = WeakKeyDictionary()


def wire_of(group: dist.ProcessGroup) -> Wire:
    if group not in _wires:
        _wires[group] = Wire(dist.get_rank(group), dist.get_world_size(group))
    return _wires[group]
