"""The owners of a bucket's gradients: arithmetic over the layout, without communication.

Its size grows with the number of ranks, so it is computed only when the first gradients are sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero.shards.layout import Layout


class Share(NamedTuple):
    """Elements [start, stop) of a parameter. param: the position of the parameter in the layout."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True)
class Message:
    """The shares in one message, in rank order, and the number of elements that go to each rank."""

    shares: list[Share]
    counts: list[int]


class Routes:
    """The owners of the gradients of one layout.

    trained: positions of the parameters that have gradients.
    alone: positions of those whose gradients are messages by themselves.
    """

    def __init__(self, layout: Layout, trained: Sequence[int] = (), alone: Sequence[int] = ()) -> None:
        self._layout, self._trained, self._alone = layout, trained, alone

    @cached_property
    def counts(self) -> dict[int, list[int]]:
        """The number of elements that go to each rank, for each parameter in `alone`."""
        counts = {index: [0] * self._layout.world for index in self._alone}
        for index, to_ranks in counts.items():
            for rank, start, stop in self._owners(index):
                to_ranks[rank] = stop - start
        return counts

    @cached_property
    def together(self) -> Message:
        """The message of all other gradients, in rank order."""
        by_rank: list[list[Share]] = [[] for _ in range(self._layout.world)]
        alone = set(self._alone)
        for index in self._trained:
            if index not in alone:
                for rank, start, stop in self._owners(index):
                    by_rank[rank].append(Share(index, start, stop))
        counts = [sum(share.stop - share.start for share in shares) for shares in by_rank]
        return Message([share for shares in by_rank for share in shares], counts)

    def _owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yields (rank, start, stop) for each owner of a parameter. An empty parameter has an owner, too."""
        bounds, offset, numel = self._layout.bounds, self._layout.offsets[index], self._layout.numels[index]
        rank = min(bisect_right(bounds, offset), self._layout.world) - 1
        yield rank, 0, min(bounds[rank + 1] - offset, numel)
        while bounds[rank + 1] < offset + numel:
            rank += 1
            if bounds[rank] < bounds[rank + 1]:
                yield rank, bounds[rank] - offset, min(bounds[rank + 1] - offset, numel)
