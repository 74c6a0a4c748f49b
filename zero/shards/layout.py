"""Geometry: where the elements of a group of parameters lie, and which rank owns which of them.

A layout is arithmetic over sizes. It holds no tensor and sends nothing, so it is the same on every rank, can be
computed for worlds that do not exist, and is tested without starting a rank.

    parameters     | weight 0              |pad| bias 0 |pad| weight 1                    |pad|
    offsets        0                           o1           o2                                numel
    even cut       |    segment of rank 0      |    segment of rank 1     |  segment of rank 2 |     equal lengths
    whole cut      |      rank 0           ----|            |         rank 2                   |     (rank 1: nothing)
    mixed cut      |      rank 0        | rank 1            |         rank 2                   |     (bias 0 whole)
    spans(1)                                   [ bias 0    ][ weight 1, from its start ]

A parameter's elements are counted in the order in which they lie in memory. Every parameter starts on a multiple of
`align` elements (64 bytes): vector loads stay aligned, and fused optimizers, which may differ in the last bit where a
cut is not a multiple of the vector width, give the same bits on a shard as on the full parameter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes. Parameters start, and are cut, on multiples of this."""


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
    whole: the parameters that are not to be cut. Others may lie with one rank by chance.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]
    whole: frozenset[int] = frozenset()

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
        """The spans of the segment of `rank`, in the order of the buffer, without padding."""
        spans = self.within(self.bounds[rank], self.bounds[rank + 1])
        # A parameter without elements also belongs to exactly one rank, so that its optimizer state exists once.
        return tuple(span for span in spans if span.numel or self.owner_of(self.offsets[span.index]) == rank)

    def within(self, low: int, high: int) -> Iterator[Span]:
        """Yields the spans of elements [low, high) of the buffer, without padding, at offsets from `low`; parameters
        without elements, too."""
        # Begins with the parameter that contains `low`, or the first that starts there, which may have no elements.
        first = min(bisect_left(self.offsets, low), max(bisect_right(self.offsets, low) - 1, 0))
        for index in range(first, len(self.offsets)):
            offset, numel = self.offsets[index], self.numels[index]
            if offset > high or (offset == high and numel):
                break
            start, stop = max(low - offset, 0), min(high - offset, numel)
            if start < stop or (numel == 0 and offset >= low):
                yield Span(index, start, stop, offset + start - low)

    def owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yields (rank, start, stop) for each owner of a parameter: its elements [start, stop). A parameter without
        elements has an owner, too."""
        bounds, offset, numel = self.bounds, self.offsets[index], self.numels[index]
        rank = self.owner_of(offset)
        yield rank, 0, min(bounds[rank + 1] - offset, numel)
        while bounds[rank + 1] < offset + numel:
            rank += 1
            if bounds[rank] < bounds[rank + 1]:
                yield rank, bounds[rank] - offset, min(bounds[rank + 1] - offset, numel)

    def owner_of(self, position: int) -> int:
        """The rank that owns the element at this position of the buffer."""
        # A parameter without elements may start at the end of the buffer, behind the last rank's segment.
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


def mixed(
    numels: Sequence[int], owners: Sequence[int | None], ends: Sequence[float], *, align: int
) -> tuple[list[int], Layout]:
    """Gives parameter i whole to rank owners[i]; those without an owner are cut. Returns the order in which they lie,
    and the layout in this order.

    ends: of all that is cut, the part that lies before the end of each rank's, such as [0.5, 1.0]. A rank's whole
    parameters lie between two that are cut, as a gathered parameter is one piece: where no border of two is within what
    the rank gets, it gets up to the nearest one.
    """
    cut = [index for index, owner in enumerate(owners) if owner is None]
    starts, total = _place([numels[index] for index in cut], align)
    wanted = np.array([0, *(min(_round_up(int(end * total), align), total) for end in ends[:-1]), total])
    sizes = np.zeros(len(ends), dtype=np.int64)  # of each rank's whole parameters together
    for numel, owner in zip(numels, owners, strict=True):
        if owner is not None:
            sizes[owner] += _round_up(numel, align)
    up_to = np.cumsum(sizes)
    # Before which position of what is cut the whole ones of a rank lie. It does not decrease from rank to rank.
    at = _nearest(np.array([*starts, total]), (wanted[:-1] + wanted[1:]) / 2)
    earlier = np.maximum.accumulate(np.where(sizes > 0, at, 0))
    later = np.minimum.accumulate(np.where(sizes > 0, at, total)[::-1])[::-1]
    bounds = np.append(np.maximum(np.minimum(wanted[1:-1], later[1:]), earlier[:-1]), total) + up_to
    lies, free = dict[int, int](), (at + up_to - sizes).tolist()
    for index, owner in enumerate(owners):
        if owner is not None:
            lies[index] = free[owner]
            free[owner] += _round_up(numels[index], align)
    before = [0, *up_to.tolist()]
    for index, start in zip(cut, starts, strict=True):
        lies[index] = start + before[int(np.searchsorted(at, start, side="right"))]
    # Those without elements come before what starts at the same place.
    order = sorted(lies, key=lambda index: (lies[index], numels[index] > 0))
    whole = frozenset(at for at, index in enumerate(order) if owners[index] is not None)
    return order, Layout(tuple(numels[i] for i in order), tuple(lies[i] for i in order), (0, *bounds.tolist()), whole)


def padded(given: Layout, *, align: int, pads_up_to: float) -> Layout:
    """Returns a layout of segments of equal length and the same owners, if no parameter is cut, and if the buffer then
    has at most `pads_up_to` times the elements; else the given one."""
    owners = [given.owner_of(offset) for offset in given.offsets]
    last = [
        given.owner_of(offset + max(numel - 1, 0)) for offset, numel in zip(given.offsets, given.numels, strict=True)
    ]
    if pads_up_to == 1 or owners != last:
        return given
    offsets, end = _place(given.numels, align)
    bounds = [0]
    for offset, owner in zip(offsets, owners, strict=True):
        bounds += [offset] * (owner + 1 - len(bounds))
    bounds += [end] * (given.world + 1 - len(bounds))
    longest = max(high - low for low, high in pairwise(bounds))
    if not 1 < longest * given.world / max(end, 1) <= pads_up_to:
        return given
    moved = [offset + rank * longest - bounds[rank] for offset, rank in zip(offsets, owners, strict=True)]
    return replace(given, offsets=tuple(moved), bounds=tuple(range(0, given.world * longest + 1, longest)))


def _nearest(sorted_values: NDArray[Any], to: NDArray[Any]) -> NDArray[Any]:
    """Returns for each of `to` the value that is nearest."""
    above = np.searchsorted(sorted_values, to).clip(max=len(sorted_values) - 1)
    below = (above - 1).clip(min=0)
    found: NDArray[Any] = sorted_values[np.where(to * 2 <= sorted_values[below] + sorted_values[above], below, above)]
    return found


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
