"""Ranks that are not there: one rank of a group of any size goes through its operations, and nothing is sent.

Tensors may be without values. What the transport that is rehearsed would hold meanwhile is allocated, so that whoever
counts memory finds it; what it would write stays as it is. The others are taken to do what this rank does.

A transfer takes no time here. Pass an `Observer` to learn how long one takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol

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

Kind = Literal["gather", "reduce", "all-to-all", "all-reduce", "broadcast", "exchange"]
"""Of transfers. An exchange is of few bytes, and keeps the host until it has all of them."""


class Observer(Protocol):
    """Sees the transfers of one group."""

    def launch(self, kind: Kind, buffers: Sequence[Tensor], nbytes: int) -> Any:
        """A transfer is launched. buffers: those that it reads or writes. nbytes: in a gather of the full buffer, else
        of all that this rank gives. Returns what `wait` is called with."""

    def wait(self, transfer: Any) -> None:
        """What is computed from here on waits for the transfer."""


class Rehearsal(Transport):
    """like: the transport that this one allocates memory as. observer: sees every transfer, if there is one."""

    def __init__(self, order: Order, rank: int, world: int, like: Rehearsed, observer: Observer | None = None) -> None:
        self._observer = observer
        self.name, self.overlaps = f"{like}, rehearsed", like == "nccl"
        self._order, self._rank, self._world = order, rank, world
        self._reads = like == "host memory"

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        longest = max(high - low for low, high in pairwise(bounds))
        padded = self.overlaps and longest * self._world != len(full)
        rows = full.new_empty(self._world * longest) if padded else None
        arrive = self._launch("gather", [full] if rows is None else [full, rows], full.nbytes)

        def finish(held: Tensor | None = rows) -> None:
            arrive()

        return Handle(finish, self._order.queue if self._reads else None)

    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Handle:
        own = [counts[self._rank] for _, counts in messages]
        if self.overlaps and scatters(messages):
            sums = messages[0][0].new_empty(own[0]) if into is None else into
            scattered = self._launch("reduce", [messages[0][0], sums], messages[0][0].nbytes)

            def arrived(held: Sequence[Message] = messages) -> Tensor:
                scattered()
                return sums

            return Handle(arrived)

        def summed(rows: Sequence[Tensor]) -> Tensor:
            total = wide(rows[0][:0]).new_empty(sum(own))
            if self.overlaps:
                for each, share in zip(rows, total.split(own), strict=True):
                    torch.sum(each, 0, dtype=total.dtype, out=share)
            for each in rows if total.dtype is not rows[0].dtype and not self.overlaps else ():
                _widened(each)
            return total if into is None else into.copy_(total)

        if self._reads:
            arrive = self._launch_messages(messages, ())

            def read() -> Tensor:
                arrive()
                return summed(self._read_in_chunks(messages[0][0], own))

            return Handle(read, self._order.queue)
        received = self.all_to_all(messages, channel)
        return Handle(lambda: summed(received.wait()))

    def all_to_all(self, messages: Sequence[Message], channel: int) -> Handle:
        def received() -> list[Tensor]:
            return [message.new_empty(self._world, counts[self._rank]) for message, counts in messages]

        if self._reads:
            arrive = self._launch_messages(messages, ())

            def read() -> list[Tensor]:
                arrive()
                return received()

            return Handle(read, self._order.queue)
        rows = received()
        arrive = self._launch_messages(messages, rows)

        def finish(held: Sequence[Message] = messages) -> list[Tensor]:
            arrive()
            return rows

        return Handle(finish)

    def _launch_messages(self, messages: Sequence[Message], rows: Sequence[Tensor]) -> Callable[[], None]:
        sent = [message for message, _ in messages]
        kind: Kind = "all-to-all" if self.overlaps else "reduce"
        return self._launch(kind, [*sent, *rows], sum(message.nbytes for message in sent))

    def _read_in_chunks(self, sample: Tensor, own: Sequence[int]) -> list[Tensor]:
        """Of so many elements of each message, what is read of it from all ranks at a time."""
        chunk = min(CHUNK // sample.element_size(), max(1, *own))
        chunks = sample.new_empty(self._world, chunk)
        return [chunks[:, : min(chunk, n)] for n in own]

    def broadcast(self, flat: Tensor, source: int) -> None:
        self._launch("broadcast", [flat], flat.nbytes)()

    def all_reduce(self, tensor: Tensor, channel: int, *, maximum: bool) -> None:
        if self._reads:
            tensor.new_empty(self._world, min(CHUNK // tensor.element_size(), tensor.numel()))
        self._launch("all-reduce", [tensor], tensor.nbytes)()

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None: ...

    def exchange(self, data: bytes) -> list[bytes]:
        self._launch("exchange", [], len(data))()
        return [data] * self._world

    def compare(self, channel: int, *, flag: bool = False) -> bool:
        self._launch("exchange", [], 0)()
        return flag

    def _launch(self, kind: Kind, buffers: Sequence[Tensor], nbytes: int) -> Callable[[], None]:
        """Returns what to call where the transfer is waited for."""
        if self._observer is None:
            return _nothing
        return partial(self._observer.wait, self._observer.launch(kind, buffers, nbytes))


def _nothing() -> None: ...


def _widened(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two ranks' rows as they are added up, and freed again."""
    return wide(rows[0]), wide(rows[-1])


class RehearsedLink(Link):
    """Of a group without a process group of torch's, on which every device sends by a rehearsal."""

    def __init__(self, rank: int, world: int, like: Rehearsed, observer: Observer | None = None) -> None:
        self.rank, self.world, self.like, self.observer = rank, world, like, observer
        self.order = Order(rank, world)
        self._rehearsal = Rehearsal(self.order, rank, world, like, observer)

    def transport(self, device: torch.device | None = None) -> Transport:
        return self._rehearsal

    def without_backend(self, devices: Iterable[torch.device]) -> str | None:
        return None
