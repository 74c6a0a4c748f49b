"""Parameters gathered within a node, optimizer state sharded over all ranks: FSDP(optimizer_sharding="all").

At two levels a rank keeps

    node shard  its contribution to an all-gather within the node: 1/S of the buffer, in the buffer's dtype
    shard       its optimizer's shard: 1/W, a slice of the node shard; the ranks at the same place in other nodes own
                the other slices

All-gathers stay within the node. Once a step an all-gather across nodes updates the node shards. Gradients are reduced
within the node first, then across nodes. (S. Wang et al., "ZeRO++", 2023, section 4.2: secondary shards; Z. Zhang et
al., "MiCS", 2022, section 3.4: hierarchical communication.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero.comm import Comm, Handle, Wire
from zero.comm.packing import lengths
from zero.comm.transport import Message
from zero.fsdp.events import ModelEvents, model_events
from zero.shards.layout import Layout
from zero.shards.placement import Exchange, Placement


class TwoLevelPlacement(Placement):
    """within: the ranks of this node, among which parameters are gathered. across: those of all nodes that have this
    rank's place. The ranks of both, in the order of `Link.joined`, own the shards of a layout. The constructor is
    collective over all ranks of the job; it raises ValueError if the two groups do not span all."""

    def __init__(self, within: Comm, across: Comm) -> None:
        super().__init__(_all_of(within, across))
        self._within, self._across = within, across

    def all_groups(self) -> list[Comm]:
        return [self._within, self._across]

    def owner(self, rank: int) -> int:
        node, place = divmod(rank, self._within.world)
        return place * self._across.world + node

    def exchange(self, layout: Layout, label: str) -> Exchange:
        return TwoLevels(self._within, self._across, layout, label)


def _all_of(within: Comm, across: Comm) -> Comm:
    """Collective over all ranks of the job. Returns the group of all ranks of both levels."""
    if within.world == 1 or across.world == 1:
        return across if within.world == 1 else within
    return Comm(within.link.joined(across.link))


class Stale(ModelEvents):
    """Has node shards gathered again where owners may have stepped their slices since."""

    def forward_begins(self) -> None:
        backward = self.model.backward
        if not backward.active and not backward.accumulates:
            for group in self.model.index.groups:
                if isinstance(group.exchange, TwoLevels):
                    group.exchange.stale = True


class TwoLevels(Exchange):
    """Gathers within a node from node shards, and reduces within the node and across nodes.

    `stale`: whether owners may have stepped their slices of the node shard since these were gathered; the same on all
    ranks.
    """

    optimizer_sharding = "all"
    packs = True

    def __init__(self, within: Comm, across: Comm, layout: Layout, label: str) -> None:
        self._across = across
        super().__init__(within, layout, label)
        slices = self._across.world
        self._bounds = layout.bounds[::slices]
        first = within.rank * slices
        own = layout.bounds[first : first + slices + 1]
        self._own = slice(own[0], own[-1])
        self._slices = [bound - own[0] for bound in own]
        self.stale = True

    def rename(self, label: str) -> None:
        super().rename(f"{label} within the node")
        self._refresh = self._across.channel(f"the gathering across nodes of {label}")
        self._averaging = self._across.channel(f"the reduction across nodes of {label}")

    def comms(self) -> list[Comm]:
        return [self.gathered_by, self._across]

    def gather(self, full: Tensor, shard: Tensor | None, wire: Wire, channel: int | None = None) -> Handle:
        """See Exchange.gather; the shard must not lie in the buffer. wire: of the all-gather across nodes."""
        assert shard is not None
        if not self.kept:
            self.kept = [full.new_empty(self._slices[-1])]
        [node_shard] = self.kept
        if self.stale:
            low, high = self._slices[self._across.rank : self._across.rank + 2]
            node_shard[low:high] = shard.to(full.device, non_blocking=True)
            across = wire.across()
            across.gather(self._across, node_shard, self._slices, self._refresh, keeps_own=False).wait()
            self.stale = False
        full[self._own] = node_shard
        return self.gathered_by.gather(full, self._bounds, self._gather if channel is None else channel)

    def reduce(self, messages: Sequence[Message], wire: Wire) -> Handle:
        """See Exchange.reduce; takes one message, the full buffer's gradients. wire: of both reductions."""
        [(gradients, _)] = messages
        node = [(gradients, lengths(self._bounds))]
        within = wire.reduce(self.gathered_by, node, 1 / self.gathered_by.world, self._reduction)

        def average() -> Tensor:
            slices = [(within.wait(), lengths(self._slices))]
            averages: Tensor = wire.reduce(self._across, slices, 1 / self._across.world, self._averaging).wait()
            return averages

        return Handle(average)


model_events.append(Stale)
