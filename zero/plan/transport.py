"""A simulated transport: one rank of a group of any size runs its operations, and nothing is sent.

It allocates the buffers that the rehearsed transport would allocate, so that memory can be metered, but does not write
received values. Tensors may have no values (meta or fake). All other ranks are assumed to do the same as this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from zero.comm import Comm
from zero.comm.host_memory import CHUNK, QueuedWork
from zero.comm.link import Link, Transports
from zero.comm.oplog import Log
from zero.comm.transport import Message, SumWork, Transport, Work, by_rings, summed_as

# The name of the rehearsed transport; "nccl" stands for all backends that overlap.
Rehearsed = Literal["gloo", "host memory", "nccl"]


class Rehearsal(Transport):
    """The simulated transport. like: the transport whose buffers are allocated."""

    def __init__(self, rank: int, world: int, like: Rehearsed) -> None:
        self.name, self.overlaps, self.reads = f"{like}, rehearsed", like == "nccl", like == "host memory"
        self._rank, self._world = rank, world
        self._queue: list[QueuedWork] = []

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        return self._transfer([full], lambda: None)

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        sent, own = [message for message, _ in messages], [counts[self._rank] for _, counts in messages]
        if self.overlaps and by_rings(messages):
            sums = sent[0].new_empty(own[0])
            return self._transfer([*sent, sums], lambda: sums)

        def summed(rows: Sequence[Tensor], times: float = 1) -> Tensor:
            total = rows[0].new_empty(sum(own), dtype=summed_as(rows[0].dtype))
            if self.overlaps:
                for message_rows, share in zip(rows, total.split(own), strict=True):
                    torch.sum(message_rows, 0, dtype=total.dtype, out=share)
            return total

        if self.reads:
            return self._transfer(sent, lambda: summed(self._read_in_chunks(sent[0], own)))
        received = [message.new_empty(self._world, counts[self._rank]) for message, counts in messages]
        work = self._transfer([*sent, *received], lambda: received)
        return SumWork(summed, work, times)

    def _transfer(self, buffers: Sequence[Tensor], finish: Callable[[], Any]) -> Work:
        """The work keeps the buffers until it has finished."""
        return QueuedWork(partial(lambda held: finish(), buffers), self._queue if self.reads else [])

    def _read_in_chunks(self, sample: Tensor, own: Sequence[int]) -> list[Tensor]:
        """Allocates the chunks that HostMemory reads from all ranks at a time. own: this rank's elements by message."""
        chunk = min(CHUNK // sample.element_size(), max(1, *own))
        chunks = sample.new_empty(self._world, chunk)
        return [chunks[:, : min(chunk, n)] for n in own]

    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        return Work()

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        if self.reads:
            if tensor.nbytes <= CHUNK:
                tensor.new_empty(self._world, tensor.numel())
            else:  # of each rank's share, and a chunk of sums, as they go where what is summed lies
                share = -(-tensor.numel() // self._world)
                tensor.new_empty(self._world + 1, min(CHUNK // tensor.element_size(), share))
        return self._transfer([tensor], lambda: tensor)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self._world

    def compare(self, channel: int, *, flags: int = 0) -> int:
        return flags


class RehearsedLink(Link):
    """The link of a simulated group, whose transport for every device is a rehearsal."""

    def __init__(self, rank: int, world: int, like: Rehearsed) -> None:
        super().__init__(None)
        self.rank, self.world, self.log = rank, world, Log(rank, world)
        rehearsal = Rehearsal(rank, world, like)
        self.transports = Transports(lambda kind: rehearsal)

    def overlaps(self, device: torch.device) -> bool:
        return self.transports[device.type].overlaps


def rehearsed(rank: int, world: int, like: Rehearsed) -> Comm:
    """Returns one rank of a simulated group that sends nothing."""
    return Comm(RehearsedLink(rank, world, like) if world > 1 else Link(None))
