"""Gather and reduce between the ranks of one host, each of which reads what it needs from the others' memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from zero.oss.neighbours import Neighbours
from zero.oss.sums import add_in_order, wide

PIECE = 1 << 18
"""Bytes that are read from each rank before they are added up: they are still in the cache then."""


def read_segments(neighbours: Neighbours, full: Tensor, bounds: Sequence[int], addresses: Mapping[int, int]) -> None:
    """Fills the segments of the other ranks, which lie at these addresses there."""
    size = full.element_size()
    for rank, address in addresses.items():
        low, high = bounds[rank : rank + 2]
        neighbours.read(rank, address, full.data_ptr() + low * size, (high - low) * size)


def read_rows(neighbours: Neighbours, rows: Tensor, addresses: Mapping[int, int]) -> None:
    """Fills the rows of the other ranks, one a rank; each lies at its address there."""
    for rank, address in addresses.items():
        neighbours.read(rank, address, rows[rank].data_ptr(), rows[rank].nbytes)


class Shares:
    """What one rank has of its messages for every rank, and what it reads from the others' for itself.

    messages: flat tensors, and how many elements of each go to each rank, as `Comm.reduce` has them.
    """

    def __init__(self, messages: Sequence[tuple[Tensor, Sequence[int]]], rank: int) -> None:
        self._messages, self._rank = [message for message, _ in messages], rank
        self._bounds = [[0, *accumulate(counts)][rank : rank + 2] for _, counts in messages]
        self._table = (ctypes.c_uint64 * len(messages))(*(message.data_ptr() for message in self._messages))

    @property
    def address(self) -> int:
        """Where the addresses of the messages lie."""
        return ctypes.addressof(self._table)

    def sum(
        self, neighbours: Neighbours, addresses: Mapping[int, int], times: float, into: Tensor | None = None
    ) -> Tensor:
        """What the others have for this rank added to its own, in the order of ranks, one message after another.

        addresses: where the other ranks' tables of addresses lie. times, into: as of `Comm.reduce`.
        """
        tables = {rank: self._read_table(neighbours, rank, address) for rank, address in addresses.items()}
        sample, world = self._messages[0], len(tables) + 1
        sums = wide(sample[:0])
        total = sums.new_empty(sum(high - low for low, high in self._bounds)) if into is None else into
        most = min(PIECE // sample.element_size(), max(1, *(high - low for low, high in self._bounds)))
        pieces = sample.new_empty(world, most)
        apart = None if into is None else sums.new_empty(most)  # `into` may be what is being added up
        done = 0
        for place, (low, high) in enumerate(self._bounds):
            for start in range(low, high, most):
                length = min(most, high - start)
                rows = [*pieces[:, :length]]
                rows[self._rank] = self._messages[place][start : start + length]
                for rank, table in tables.items():
                    size = sample.element_size()
                    neighbours.read(rank, table[place] + start * size, rows[rank].data_ptr(), length * size)
                here = total[done : done + length]
                add_in_order(rows, here if apart is None else apart[:length], times)
                if apart is not None:
                    here.copy_(apart[:length])
                done += length
        return total

    def _read_table(self, neighbours: Neighbours, rank: int, address: int) -> Sequence[int]:
        table = type(self._table)()
        neighbours.read(rank, address, ctypes.addressof(table), ctypes.sizeof(table))
        return list(table)
