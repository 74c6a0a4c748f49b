"""Geometry: where the elements of a group of parameters lie, and which rank owns which of them.

A layout is arithmetic over sizes. It holds no tensor and sends nothing, so it is the same on every rank, can be
computed for worlds that do not exist, and is tested without starting a rank.

    parameters     | weight 0              |pad| bias 0 |pad| weight 1                    |pad|
    offsets        0                           o1           o2                                numel
    even cut       |    segment of rank 0      |    segment of rank 1     |  segment of rank 2 |     equal lengths
    whole cut      |      rank 0           ----|            |         rank 2                   |     (rank 1: nothing)
    spans(1)                                   [ bias 0    ][ weight 1, from its start ]

A parameter's elements are counted in the order in which they lie in memory. Every parameter starts on a multiple of
`align` elements (64 bytes): vector loads stay aligned, and fused optimizers, which may differ in the last bit where a
cut is not a multiple of the vector width, give the same bits on a shard as on the full parameter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes. Parameters start, and are cut, on multiples of this."""

Loads = list[int] | NDArray[np.int64]
"""Bytes that each rank owns already."""


@dataclass(frozen=True)
class Span:
    """What one segment holds of one parameter: its elements [start, stop), at `offset` in the segment."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Offsets of parameters in one flat buffer, and the buffer's cut into one segment a rank. All in elements.

    numels: elements of each parameter.
    offsets: where each parameter starts in the buffer.
    bounds: world + 1 positions; rank r owns [bounds[r], bounds[r + 1]).
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    def __hash__(self) -> int:
        few = self.bounds[:: self.world // 16 + 1]  # they are as many as the ranks; these suffice
        return hash((self.numels, few))

    @property
    def world(self) -> int:
        return len(self.bounds) - 1

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    def segment(self, rank: int) -> slice:
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of the segment of `rank`, in the order of the buffer, without padding.

        A parameter without elements also belongs to exactly one rank, so that its optimizer state exists once.
        """
        low, high = self.bounds[rank], self.bounds[rank + 1]
        spans = []
        # Begins with the parameter that contains `low`, or the first that starts there, which may have no elements.
        first = min(bisect_left(self.offsets, low), max(bisect_right(self.offsets, low) - 1, 0))
        for index in range(first, len(self.offsets)):
            offset, numel = self.offsets[index], self.numels[index]
            if offset > high or (offset == high and numel):
                break
            start, stop = max(low - offset, 0), min(high - offset, numel)
            if start < stop or (numel == 0 and self._owner_of(offset) == rank):
                spans.append(Span(index, start, stop, offset + start - low))
        return tuple(spans)

    def owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yields (rank, start, stop) for each owner of a parameter: its elements [start, stop). A parameter without
        elements has an owner, too."""
        bounds, offset, numel = self.bounds, self.offsets[index], self.numels[index]
        rank = self._owner_of(offset)
        yield rank, 0, min(bounds[rank + 1] - offset, numel)
        while bounds[rank + 1] < offset + numel:
            rank += 1
            if bounds[rank] < bounds[rank + 1]:
                yield rank, bounds[rank] - offset, min(bounds[rank + 1] - offset, numel)

    def _owner_of(self, position: int) -> int:
        return min(bisect_right(self.bounds, position) - 1, self.world - 1)


def even(numels: Sequence[int], world: int, *, align: int) -> Layout:
    """Cuts the buffer into segments of equal length, at multiples of `align`, also inside parameters."""
    return _even(tuple(numels), world, align)


@lru_cache(maxsize=64)  # the blocks of a model are alike
def _even(numels: tuple[int, ...], world: int, align: int) -> Layout:
    offsets, end = _place(numels, align)
    length = _round_up(end, align * world) // world
    bounds = range(0, world * length + 1, length) if length else [0] * (world + 1)
    return Layout(numels, offsets, tuple(bounds))


def whole(numels: Sequence[int], owners: Sequence[int], world: int, *, align: int, pads_up_to: float = 1.0) -> Layout:
    """Cuts the buffer between parameters only: parameter i goes to rank owners[i]. Owners must not decrease.

    pads_up_to: segments are padded to equal length if the buffer then has at most so many times the elements.
    """
    assert [*owners] == sorted(owners), "parameters must come in the order of owners"
    offsets, end = _place(numels, align)
    bounds = [0]
    for offset, owner in zip(offsets, owners, strict=True):
        bounds += [offset] * (owner + 1 - len(bounds))
    bounds += [end] * (world + 1 - len(bounds))
    longest = max(high - low for low, high in pairwise(bounds))
    if not 1 < longest * world / max(end, 1) <= pads_up_to:
        return Layout(tuple(numels), offsets, tuple(bounds))
    moved = [offset + rank * longest - bounds[rank] for offset, rank in zip(offsets, owners, strict=True)]
    return Layout(tuple(numels), tuple(moved), tuple(range(0, world * longest + 1, longest)))


def assign(sizes: Sequence[int], loads: Loads) -> list[int]:
    """Returns an owner for each parameter, such that loads are as equal as uncut parameters allow.

    Longest processing time first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969): the largest
    parameter goes to the rank with the smallest load, whatever the order of the parameters.
    """
    held = np.array(loads, dtype=np.int64)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = int(held.argmin())  # with many ranks cheaper than a heap, unless there are very many parameters
        owners[index] = rank
        held[rank] += sizes[index]
    return owners


def runs(sizes: Sequence[int], limit: int) -> list[range]:
    """Divides indices into consecutive runs whose sizes add up to at most `limit`, or of one index."""
    result, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            result.append(range(first, index))
            first, total = index, 0
        total += size
    if first < len(sizes):
        result.append(range(first, len(sizes)))
    return result


def _place(numels: Sequence[int], align: int) -> tuple[tuple[int, ...], int]:
    *offsets, end = accumulate((_round_up(numel, align) for numel in numels), initial=0)
    return tuple(offsets), end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
