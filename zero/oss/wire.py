"""What all users of one process group share: the numbers of operations, and the order in which they are completed."""

from __future__ import annotations

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

    def __init__(self) -> None:
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


_wires: WeakKeyDictionary[dist.ProcessGroup, Wire] = WeakKeyDictionary()


def wire_of(group: dist.ProcessGroup) -> Wire:
    return _wires.setdefault(group, Wire())
