"""Gather and reduce between the ranks of one host, each of which reads what it needs from the others' memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from zero.oss.neighbours import Neighbours


def read_segments(neighbours: Neighbours, full: Tensor, bounds: Sequence[int], addresses: Mapping[int, int]) -> None:
    """Fills the segments of the other ranks, which lie at these addresses there."""
    size = full.element_size()
    for rank, address in addresses.items():
        low, high = bounds[rank : rank + 2]
        neighbours.read(rank, address, full.data_ptr() + low * size, (high - low) * size)


class Shares:
    """What one rank has of its messages for every rank, and what it reads from the others' for itself.

    messages: flat tensors, and how many elements of each go to each rank, as `Comm.reduce` has them.
    rows: of each message, what each rank has of it for this one.
    """

    def __init__(self, messages: Sequence[tuple[Tensor, Sequence[int]]], rank: int) -> None:
        self._messages, self._rank = messages, rank
        self._bounds = [[0, *accumulate(counts)][rank : rank + 2] for _, counts in messages]
        self._table = (ctypes.c_uint64 * len(messages))(*(message.data_ptr() for message, _ in messages))
        self.rows = [
            list(message.new_empty(len(counts) * (high - low)).view(len(counts), high - low))
            for (message, counts), (low, high) in zip(messages, self._bounds, strict=True)
        ]
        for rows, (message, _), (low, high) in zip(self.rows, messages, self._bounds, strict=True):
            rows[rank] = message[low:high]

    @property
    def address(self) -> int:
        """Where the addresses of the messages lie."""
        return ctypes.addressof(self._table)

    def read(self, neighbours: Neighbours, addresses: Mapping[int, int]) -> None:
        """Fills the rows of the other ranks, whose tables of addresses lie at these addresses there."""
        theirs = type(self._table)()
        for rank, address in addresses.items():
            neighbours.read(rank, address, ctypes.addressof(theirs), ctypes.sizeof(theirs))
            for rows, (low, high), start in zip(self.rows, self._bounds, theirs, strict=True):
                size = rows[rank].element_size()
                neighbours.read(rank, start + low * size, rows[rank].data_ptr(), (high - low) * size)
