"""Ranks that are not there: one rank of a group of any size goes through its operations, and nothing is sent.

Tensors may be without values. What the transport that is rehearsed would hold meanwhile is allocated, so that whoever
counts memory finds it; what it would write stays as it is. The others are taken to do what this rank does.

A transfer takes no time here. Whoever is to tell how long one takes has `launch` and `wait` of every one pass here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from zero.comm.handle import Handle
from zero.comm.host_memory import CHUNK
from zero.comm.link import Link
from zero.comm.order import Order
from zero.comm.process_group import scatters
from zero.comm.sums import wide
from zero.comm.transport import Message, Transport

Rehearsed = Literal["gloo", "host memory", "nccl"]
"""The transport that is rehearsed, by its name; "nccl" stands for all that overlap."""


class Rehearsal(Transport):
    """like: the transport that this one allocates memory as."""

    def __init__(self, order: Order, rank: int, world: int, like: Rehearsed) -> None:
        self.name, self.overlaps = f"{like}, rehearsed", like == "nccl"
        self._order, self._rank, self._world = order, rank, world
        self._reads = like == "host memory"

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        longest = max(high - low for low, high in pairwise(bounds))
        padded = self.overlaps and longest * self._world != len(full)
        rows = full.new_empty(self._world * longest) if padded else None

        def finish(held: Tensor | None = rows) -> None: ...

        return Handle(finish, self._order.queue if self._reads else None)

    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Handle:
        own = [counts[self._rank] for _, counts in messages]
        if self.overlaps and scatters(messages):
            sums = messages[0][0].new_empty(own[0]) if into is None else into
            return Handle(lambda: sums)

        def summed(rows: Sequence[Tensor]) -> Tensor:
            total = wide(rows[0][:0]).new_empty(sum(own))
            for each in rows if total.dtype is not rows[0].dtype and not self.overlaps else ():
                _widened(each)
            return total if into is None else into.copy_(total)

        if self._reads:
            return Handle(lambda: summed(self._read_piece_by_piece(messages[0][0], own)), self._order.queue)
        received = self.all_to_all(messages, channel)
        return Handle(lambda: summed(received.wait()))

    def all_to_all(self, messages: Sequence[Message], channel: int) -> Handle:
        def received() -> list[Tensor]:
            return [message.new_empty(self._world, counts[self._rank]) for message, counts in messages]

        if self._reads:
            return Handle(received, self._order.queue)
        rows = received()

        def finish(held: Sequence[Message] = messages) -> list[Tensor]:
            return rows

        return Handle(finish)

    def _read_piece_by_piece(self, sample: Tensor, own: Sequence[int]) -> list[Tensor]:
        """Of so many elements of each message, what is read of it from all ranks at a time."""
        piece = min(CHUNK // sample.element_size(), max(1, *own))
        chunks = sample.new_empty(self._world, piece)
        return [chunks[:, : min(piece, n)] for n in own]

    def broadcast(self, flat: Tensor, source: int) -> None: ...

    def all_reduce(self, tensor: Tensor, channel: int, *, maximum: bool) -> None:
        if self._reads:
            tensor.new_empty(self._world, min(CHUNK // tensor.element_size(), tensor.numel()))

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None: ...

    def exchange(self, data: bytes) -> list[bytes]:
        return [data] * self._world

    def compare(self, channel: int, *, flag: bool = False) -> bool:
        return flag


def _widened(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two ranks' rows as they are added up, and freed again."""
    return wide(rows[0]), wide(rows[-1])


class RehearsedLink(Link):
    """Of a group without a process group of torch's, on which every device sends by a rehearsal."""

    def __init__(self, rank: int, world: int, like: Rehearsed) -> None:
        self.rank, self.world = rank, world
        self.order = Order(rank, world)
        self._rehearsal = Rehearsal(self.order, rank, world, like)

    def transport(self, device: torch.device | None = None) -> Transport:
        return self._rehearsal

    def without_backend(self, devices: Iterable[torch.device]) -> str | None:
        return None
