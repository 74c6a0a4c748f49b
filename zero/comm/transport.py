"""The interface of all transports, and the transport of a group of one rank.

Code above does not know which transport runs. `channel` is the number of an operation (oplog.py). Ranks compare it, so
that all raise when they are out of step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero.comm.oplog import TAIL, Log
from zero.comm.packing import sum_in_rank_order
from zero.comm.work import SumWork, Work

Scattered = tuple[list[Tensor], Tensor]
"""The pieces of a part, one a rank, on the rank that sends them; and what this rank gets."""

Message = tuple[Tensor, Sequence[int]]
"""A flat tensor, and the number of its elements that go to each rank, in rank order: the same numbers on all ranks."""


class Transport(ABC):
    """Sends tensors on one type of device between the ranks of one group.

    All methods are collective. The tensors passed in must not change until the call, or `wait` of the returned work,
    has returned. Ranks compare each call as oplog.py says; where they differ, it raises RuntimeError on every rank.
    """

    name: str
    """The name shown in logs."""
    overlaps: bool
    """Whether transfers run beside the computing, without taking the processor from it. The number of kernels of a
    reduce of one message then does not depend on the number of ranks."""

    reads = False
    """Whether ranks read from one another's memory."""

    @abstractmethod
    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        """Fills the flat `full`. Rank r sends elements [bounds[r], bounds[r + 1]), which its own `full` holds."""

    @abstractmethod
    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        """Sums over the ranks the elements sent to this rank. `wait` returns `times` the sums, flat, one message after
        another, of 16-bit floats in float32. On the CPU they are added in rank order."""

    @abstractmethod
    def broadcast(self, flat: Tensor, source: int) -> None:
        """Overwrites the tensor with that of rank `source`."""

    @abstractmethod
    def scatter(self, parts: Iterator[Scattered], nbytes: int) -> None:
        """Overwrites the tensor of rank r by the first rank's piece r, part by part, which are flat. nbytes: of all
        parts of one rank. A part is made while the one before it is on its way, and not earlier."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        """Overwrites the contiguous tensor with `times` the sum, or with the maximum, over the ranks. `wait` returns
        its elements."""

    @abstractmethod
    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None, device: torch.device) -> None:
        """Sends flat tensors from their owners to rank `to`, or (None) to all ranks. See Comm.collect."""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the data of every rank, by rank. All ranks pass the same number of bytes, at least one."""

    @abstractmethod
    def compare(self, channel: int, *, flags: int = 0) -> int:
        """Compares between ranks this operation and the logs. Returns the flags, up to two bits, that any rank has."""


class Local(Transport):
    """The transport of a group of one rank."""

    name, overlaps = "this process alone", False

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        return Work()

    def reduce(self, messages: Sequence[Message], times: float, channel: int) -> Work:
        # A sum over one row is a copy: `times` must not change the gradients that were sent.
        return SumWork(sum_in_rank_order, Work([message.unsqueeze(0) for message, _ in messages]), times)

    def broadcast(self, flat: Tensor, source: int) -> None: ...

    def scatter(self, parts: Iterator[Scattered], nbytes: int) -> None: ...

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        return Work(tensor)

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None, device: torch.device) -> None: ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def compare(self, channel: int, *, flags: int = 0) -> int:
        return flags


def refuse_differing_logs(transport: Transport, log: Log) -> None:
    """Collective. Raises RuntimeError on every rank, after their logs were found to differ."""
    length, tail = log.history
    # Filled up by -1: all ranks must pass as many bytes, however long their logs are.
    received = transport.all_gather_bytes(array("q", [length, *tail, *[-1] * (TAIL - len(tail))]).tobytes())
    histories = {}
    for rank, history in enumerate(received):
        length, *channels = array("q", history)
        histories[rank] = length, [channel for channel in channels if channel >= 0]
    log.out_of_step(log.difference(histories))
