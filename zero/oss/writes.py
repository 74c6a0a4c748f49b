"""What is written into full parameters while they are unsharded, such as averages and clamps: each element stays as its
owner wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zero._torch import has_values, writes_so_far
from zero.comm import Int8

_CHUNK = 2**18
"""Elements that are compared at a time, so that no copy of a shard is made."""


class Writes:
    """Into the parameters of one shard group.

    quantised: how the shards were rounded when they were gathered last.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.quantised: Int8 | None = None
        self._params = params
        self._when_gathered = 0
        """How often torch had counted writes when they were gathered last."""
        self._looks = self._uncounted = False

    def _count(self) -> int:
        return writes_so_far(self._params)

    def gathered(self) -> None:
        self._when_gathered = self._count()

    def look(self) -> None:
        """Has the next `any` look whether there were writes that torch does not count: through `param.data`.

        If so, every later one expects them. This reads the whole shard, too much to do it each time.
        """
        self._looks = True

    def any(self, full: Tensor, shard: Tensor) -> bool:
        """Since the parameters were gathered. full: what the gathered buffer has of this rank's shard."""
        if self._looks:
            self._looks = False
            self._uncounted = has_values(full) and any(
                not torch.equal(now, gathered) for now, _, gathered in self._chunks(full, shard)
            )
        return self._uncounted or self._count() != self._when_gathered

    def take_over(self, full: Tensor, shard: Tensor) -> None:
        """Into the shard, what differs: where `full` has a lower precision, the rest keeps its own."""
        with torch.no_grad():
            for now, own, gathered in self._chunks(full, shard):
                same = (now == gathered).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))

    def _chunks(self, full: Tensor, shard: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of both, and what the shard was when it was gathered."""
        block = self.quantised.block if self.quantised is not None else 1
        size = max(_CHUNK // block, 1) * block
        for now, own in zip(full.split(size), shard.split(size), strict=True):
            gathered = own.to(now)
            yield now, own, gathered if self.quantised is None else self.quantised.rounded(gathered)
