"""Flat buffers that are sharded at two levels: parameters among the ranks of a node, what is stepped among all ranks.

    node shard    what this rank gives when parameters are gathered within its node: 1/S of the buffer, of its dtype
    shard         what this rank's optimizer steps: 1/W, a piece of the node shard; the ranks that have the same place
                  in other nodes have the other pieces

Gathers stay within the node, but for one a step, across nodes, by which the node shards follow what was stepped.
Gradients are reduced within the node first, and what comes of that across nodes. (S. Wang et al., "ZeRO++", 2023,
section 4.2: secondary shards; Z. Zhang et al., "MiCS", 2022, section 3.4: hierarchical communication.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from zero.comm import Comm, Handle, Int8
from zero.oss.layout import Layout


@dataclass(frozen=True)
class Levels:
    """within: the ranks of this node, among which parameters are gathered. across: those of all nodes that have this
    rank's place. The ranks of both, in the order of `Comm.of_both`, own the segments of a layout."""

    within: Comm
    across: Comm


class NodeShard:
    """That of one flat buffer. label: what errors call the buffer.

    `stale`: whether the owners may have stepped their pieces since they were gathered; the same on all ranks.
    """

    def __init__(self, layout: Layout, levels: Levels, label: str) -> None:
        self.stale = True
        self.within, self._across = levels.within, levels.across
        pieces = self._across.world
        self._bounds = layout.bounds[::pieces]
        first = self.within.rank * pieces
        own = layout.bounds[first : first + pieces + 1]
        self._own = slice(own[0], own[-1])
        self._pieces = [bound - own[0] for bound in own]
        self.tensor: Tensor | None = None
        """Made at the first gather."""
        self._refresh_channel = self._across.channel(f"the gathering across nodes of {label}")
        self._gather_channel = self.within.channel(f"the gathering within the node of {label}")
        self._reduce_channel = self.within.channel(f"the reduction within the node of {label}")
        self._average_channel = self._across.channel(f"the reduction across nodes of {label}")

    def gather(self, full: Tensor, shard: Tensor, quantised: Int8 | None) -> Handle:
        """Collective. Fills the full buffer. shard: what this rank steps. quantised: what goes across nodes."""
        if self.tensor is None:
            self.tensor = full.new_empty(self._pieces[-1])
        if self.stale:
            low, high = self._pieces[self._across.rank : self._across.rank + 2]
            self.tensor[low:high] = shard.to(full.device, non_blocking=True)
            self._across.gather(self.tensor, self._pieces, self._refresh_channel, sent_as=quantised).wait()
            self.stale = False
        full[self._own] = self.tensor
        return self.within.gather(full, self._bounds, self._gather_channel)

    def reduce(self, gradients: Tensor, quantised: Int8 | None) -> Handle:
        """Collective. `wait` returns the average of this rank's shard. gradients: of the full buffer. quantised: how
        they travel, within the node and across."""
        message, times = (gradients, _lengths(self._bounds)), 1 / self.within.world
        handle = self.within.reduce([message], times=times, channel=self._reduce_channel, sent_as=quantised)

        def average() -> Tensor:
            message, times = (handle.wait(), _lengths(self._pieces)), 1 / self._across.world
            reduced = self._across.reduce([message], times=times, channel=self._average_channel, sent_as=quantised)
            result: Tensor = reduced.wait()
            return result

        return Handle(average)


def _lengths(bounds: tuple[int, ...] | list[int]) -> list[int]:
    return [high - low for low, high in pairwise(bounds)]
