"""Which rank gets what of a bucket's gradients: arithmetic over the layout, nothing is sent.

It is as long as the world, so it is worked out when the first gradients are sent, and not where none are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero.oss.layout import Layout


class Share(NamedTuple):
    """Elements [start, stop) of a parameter. param: its index in the layout."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True)
class Message:
    """What goes to the ranks in one message, in the order of ranks, and how many elements of it go to each."""

    shares: list[Share]
    counts: list[int]


class Routes:
    """Of one layout.

    trained: indices of the parameters that have gradients.
    alone: of them, those whose gradients travel by themselves.
    """

    def __init__(self, layout: Layout, trained: Sequence[int] = (), alone: Sequence[int] = ()) -> None:
        self._layout, self._trained, self._alone = layout, trained, alone

    @cached_property
    def counts(self) -> dict[int, list[int]]:
        """Of each parameter that travels alone how many elements go to each rank."""
        counts = {index: [0] * self._layout.world for index in self._alone}
        for index, to_ranks in counts.items():
            for rank, start, stop in self._owners(index):
                to_ranks[rank] = stop - start
        return counts

    @cached_property
    def together(self) -> Message:
        """Shares of the other parameters, in the order of ranks."""
        by_rank: list[list[Share]] = [[] for _ in range(self._layout.world)]
        alone = set(self._alone)
        for index in self._trained:
            if index not in alone:
                for rank, start, stop in self._owners(index):
                    by_rank[rank].append(Share(index, start, stop))
        counts = [sum(share.stop - share.start for share in shares) for shares in by_rank]
        return Message([share for shares in by_rank for share in shares], counts)

    def _owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """The ranks that own something of a parameter, from where to where. One without elements has an owner, too."""
        bounds, offset, numel = self._layout.bounds, self._layout.offsets[index], self._layout.numels[index]
        rank = min(bisect_right(bounds, offset), self._layout.world) - 1
        yield rank, 0, min(bounds[rank + 1] - offset, numel)
        while bounds[rank + 1] < offset + numel:
            rank += 1
            if bounds[rank] < bounds[rank + 1]:
                yield rank, bounds[rank] - offset, min(bounds[rank + 1] - offset, numel)
