"""Writes into unsharded parameters, such as averages and clamps: each element keeps its owner's value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zero._torch import has_values, writes_so_far
from zero.comm import Wire
from zero.comm.wire import PLAIN

_CHUNK = 2**18
"""Elements that are compared at a time, so that temporaries are small."""


class Writes:
    """Detects writes into the unsharded parameters of one shard group, and copies them into the shard.

    wire: by which the last all-gather was sent.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.wire: Wire = PLAIN
        self._params = params
        self._when_gathered = 0
        """torch's count of writes at the last all-gather."""
        self._looks = self._uncounted = False

    def _count(self) -> int:
        return writes_so_far(self._params)

    def gathered(self) -> None:
        self._when_gathered = self._count()

    def look(self) -> None:
        """Makes the next `any` look for writes that torch does not count: through `param.data`.

        If it finds some, every later `any` expects such writes. Looking reads the entire shard, so it is done once.
        """
        self._looks = True

    def any(self, full: Tensor, shard: Tensor) -> bool:
        """Whether there were writes since the all-gather. full: this rank's segment of the full buffer."""
        if self._looks:
            self._looks = False
            self._uncounted = has_values(full) and any(
                not torch.equal(now, gathered) for now, _, gathered in self._chunks(full, shard)
            )
        return self._uncounted or self._count() != self._when_gathered

    def take_over(self, full: Tensor, shard: Tensor) -> None:
        """Copies elements that differ into the shard; where `full` has a lower precision, the others keep theirs."""
        with torch.no_grad():
            for now, own, gathered in self._chunks(full, shard):
                same = (now == gathered).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))

    def _chunks(self, full: Tensor, shard: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields chunks of both, and of the shard as it arrived in the all-gather."""
        size = max(_CHUNK // self.wire.block, 1) * self.wire.block
        for now, own in zip(full.split(size), shard.split(size), strict=True):
            yield now, own, self.wire.arrives_as(own.to(now))
