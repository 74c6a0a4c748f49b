"""How the shards of one group reach all ranks, and how its gradients reach their owners.

    Exchange    shards are gathered among the ranks that own them, and gradients are averaged over these ranks
    Replicated  averages are averaged over the replicate group, too (hybrid sharding)
    TwoLevels   parameters are gathered within a node; the optimizer's shards are cut over all ranks

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

import torch
from torch import Tensor

from zero.comm import Comm, Handle, Int8
from zero.comm.packing import lengths
from zero.comm.transport import Message
from zero.oss.layout import Layout
from zero.oss.placement import Levels, Placement

Wire = torch.dtype | Int8 | None
"""The dtype or the quantisation in which floats are sent; None sends them as they are."""


class Exchange:
    """Gathers and reduces among the ranks that own the shards.

    label: the name of the group in error messages.
    `gathered_by`: the ranks among which the full buffer is gathered and gradients are reduced first.
    `packs`: whether `reduce` needs gradients as one message in the order of the layout.
    `node_shard`: see above; None until the first gather, and without two levels.
    """

    packs = False
    node_shard: Tensor | None = None

    def __init__(self, comm: Comm, layout: Layout, label: str) -> None:
        self.gathered_by, self._layout = comm, layout
        self._own = layout.segment(comm.rank)
        self.rename(label)

    def rename(self, label: str) -> None:
        """Sets the name of the group in error messages; on every rank at the same point."""
        self._gather = self.gathered_by.channel(f"the gathering of {label}")
        self._reduction = self.gathered_by.channel(f"the reduction of {label}")

    def comms(self) -> list[Comm]:
        """The groups of ranks over which gradients are reduced, one after another."""
        return [self.gathered_by]

    def expect_steps(self) -> None:
        """Called on all ranks where the owners may have stepped their shards since the last gather."""

    def gather(self, full: Tensor, shard: Tensor | None, wire: Wire, channel: int | None = None) -> Handle:
        """Collective. Fills the full buffer.

        shard: this rank's shard, which keeps its precision whatever the wire; None if it lies in the buffer already.
        channel: of `gathered_by`, by default "the gathering of" the group.
        """
        channel = self._gather if channel is None else channel
        if shard is not None:
            own = full[self._own]
            own.copy_(shard.to(own.device, non_blocking=True))
        comm, bounds = self.gathered_by, self._layout.bounds
        if isinstance(wire, torch.dtype):
            if comm.world > 1 and full.is_floating_point() and wire.itemsize < full.element_size():
                return self._gather_as(wire, full, channel)
            wire = None
        return comm.gather(full, bounds, channel, sent_as=wire, keeps_own=shard is None)

    def _gather_as(self, dtype: torch.dtype, full: Tensor, channel: int) -> Handle:
        sent = full.new_empty(full.numel(), dtype=dtype)
        sent[self._own] = full[self._own]
        handle = self.gathered_by.gather(sent, self._layout.bounds, channel)

        def finish() -> None:
            handle.wait()
            full[: self._own.start] = sent[: self._own.start]
            full[self._own.stop :] = sent[self._own.stop :]

        return Handle(finish)

    def reduce(self, messages: Sequence[Message], wire: Int8 | None) -> Handle:
        """Collective. `wait` returns the averages for this rank's shard, flat, one message after another."""
        comm = self.gathered_by
        return comm.reduce(messages, times=1 / comm.world, channel=self._reduction, sent_as=wire)


class Replicated(Exchange):
    """Averages over replicas, too: the ranks that own the same shard."""

    def __init__(self, comm: Comm, replicas: Comm, layout: Layout, label: str) -> None:
        self._replicas = replicas
        super().__init__(comm, layout, label)

    def rename(self, label: str) -> None:
        super().rename(label)
        self._averaging = self._replicas.channel(f"the averaging over replicas of {label}")

    def comms(self) -> list[Comm]:
        return [self.gathered_by, self._replicas]

    def reduce(self, messages: Sequence[Message], wire: Int8 | None) -> Handle:
        within = super().reduce(messages, wire)

        def average() -> Tensor:
            averages: Tensor = within.wait()
            self._replicas.all_reduce(averages, channel=self._averaging)
            return averages.mul_(1 / self._replicas.world)

        return Handle(average)


class TwoLevels(Exchange):
    """Gathers within a node from node shards, and reduces within the node and across nodes.

    `stale`: whether owners may have stepped their slices of the node shard since these were gathered; the same on all
    ranks.
    """

    packs = True

    def __init__(self, levels: Levels, layout: Layout, label: str) -> None:
        self._across = levels.across
        super().__init__(levels.within, layout, label)
        slices = self._across.world
        self._bounds = layout.bounds[::slices]
        first = levels.within.rank * slices
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

    def expect_steps(self) -> None:
        self.stale = True

    def gather(self, full: Tensor, shard: Tensor | None, wire: Wire, channel: int | None = None) -> Handle:
        """See Exchange.gather; the shard must not lie in the buffer. wire: of the all-gather across nodes."""
        assert shard is not None
        if self.node_shard is None:
            self.node_shard = full.new_empty(self._slices[-1])
        if self.stale:
            low, high = self._slices[self._across.rank : self._across.rank + 2]
            self.node_shard[low:high] = shard.to(full.device, non_blocking=True)
            quantised = wire if isinstance(wire, Int8) else None
            self._across.gather(self.node_shard, self._slices, self._refresh, sent_as=quantised).wait()
            self.stale = False
        full[self._own] = self.node_shard
        return self.gathered_by.gather(full, self._bounds, self._gather if channel is None else channel)

    def reduce(self, messages: Sequence[Message], wire: Int8 | None) -> Handle:
        """See Exchange.reduce; takes one message, the full buffer's gradients. wire: of both reductions."""
        [(gradients, _)] = messages
        node = [(gradients, lengths(self._bounds))]
        within = self.gathered_by.reduce(node, times=1 / self.gathered_by.world, channel=self._reduction, sent_as=wire)

        def average() -> Tensor:
            slices = [(within.wait(), lengths(self._slices))]
            averages: Tensor = self._across.reduce(
                slices, times=1 / self._across.world, channel=self._averaging, sent_as=wire
            ).wait()
            return averages

        return Handle(average)


def exchange_among(placement: Placement, layout: Layout, label: str) -> Exchange:
    """The exchange for a placement."""
    if placement.levels is not None:
        return TwoLevels(placement.levels, layout, label)
    if placement.replicas is not None:
        return Replicated(placement.comm, placement.replicas, layout, label)
    return Exchange(placement.comm, layout, label)
