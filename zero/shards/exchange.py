"""How the shards of one group reach all ranks, and how its gradients reach their owners.

    Exchange    shards are gathered among the ranks that own them, and gradients are averaged over these ranks
    Replicated  averages are averaged over the replicate group, too (hybrid sharding)

A Placement makes the exchanges of its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from zero.comm import Comm, Handle, Wire
from zero.comm.transport import Message
from zero.shards.layout import Layout


class Exchange:
    """Gathers and reduces among the ranks that own the shards.

    label: the name of the group in error messages.
    `gathered_by`: the ranks among which the full buffer is gathered and gradients are reduced first.
    `optimizer_sharding`: the value of FSDP's option by which users get it.
    `packs`: whether `reduce` needs gradients as one message in the order of the layout.
    `kept`: tensors that it holds between gathers, besides the shard.
    """

    optimizer_sharding: Literal["group", "all"] = "group"
    packs = False
    kept: Sequence[Tensor] = ()

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

    def gather(self, full: Tensor, shard: Tensor | None, wire: Wire, channel: int | None = None) -> Handle:
        """Collective. Fills the full buffer.

        shard: this rank's shard, which keeps its precision whatever the wire; None if it lies in the buffer already.
        channel: of `gathered_by`, by default "the gathering of" the group.
        """
        channel = self._gather if channel is None else channel
        if shard is not None:
            own = full[self._own]
            own.copy_(shard.to(own.device, non_blocking=True))
        return wire.gather(self.gathered_by, full, self._layout.bounds, channel, keeps_own=shard is None)

    def reduce(self, messages: Sequence[Message], wire: Wire) -> Handle:
        """Collective. `wait` returns the averages for this rank's shard, flat, one message after another."""
        comm = self.gathered_by
        return wire.reduce(comm, messages, 1 / comm.world, self._reduction)


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

    def reduce(self, messages: Sequence[Message], wire: Wire) -> Handle:
        within = super().reduce(messages, wire)

        def average() -> Tensor:
            averages: Tensor = within.wait()
            self._replicas.all_reduce(averages, channel=self._averaging)
            return averages.mul_(1 / self._replicas.world)

        return Handle(average)
