"""The interface of all transports, and the transport of a group of one rank.

Code above does not know which transport runs. `channel` is the number of an operation (oplog.py). Ranks compare it, so
that all raise when they are out of step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain, repeat
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero.comm.oplog import TAIL, Log
from zero.comm.packing import sum_in_rank_order

# ----------------------------------------------------------------------------------------------------------------- work
#
# Transfers in flight, and the context in which a part of one may fail.
#
#     Work        of any transport. Each kind has a `wait` of its own, and holds no method of its own: an object that
# does
#                 is a cycle, and its buffers would live until garbage is collected where nobody waits for it
#     GroupWork   collectives of a process group
#     SumWork     sums of what an all-to-all brings
#
# StreamWork is in streams.py, QueuedWork in host_memory/transport.py, ReplicaWork in zero/shards/placement.py.


# Times between looks at the other ranks while a rank waits; the last one is repeated.
_INTERVALS = [timedelta(seconds=seconds) for seconds in (0.25, 0.25, 0.25, 0.25, 0.5, 1, 2, 4)]


class Work:
    """A transfer in flight, which owns its buffers until `wait` has returned; by itself, one that is complete."""

    before: Work | None = None
    """What may be waited for earlier, where this one goes on with its result."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait_for_sent(self) -> bool:
        """Waits for what this rank has sent, and frees it. Returns whether `wait` then has more to do than to return;
        otherwise has done nothing."""
        before, self.before = self.before, None
        if before is None:
            return False
        before.wait()
        return True

    def wait(self) -> Any:
        """Waits for the transfer and returns its result, or raises its error. Must not be called after it returned."""
        return self._result


class Operation:
    """A context for a part of an operation that can fail: its launch, or the wait for it. Keeps the buffers alive if it
    does, as what is in flight may still write into them. A class, as a context of contextlib takes as long as a launch.

    channel: None before ranks have channels.
    Raises RuntimeError for errors of a backend or the system, and if an earlier transfer has failed.
    """

    def __init__(self, log: Log, channel: int | None, buffers: object) -> None:
        self._log, self._channel, self._buffers = log, channel, buffers

    def __enter__(self) -> None:
        if self._log.failure.broken:
            self._log.failure.refuse_if_broken(self._buffers)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._log.failure.of_transfer(self._channel, self._buffers, error)


class GroupWork(Work):
    """Collectives of a process group that were launched. `wait` returns `times` the result.

    blocks: whether a wait blocks the host, which looks meanwhile whether another rank is known to be missing.
    works: of torch; None for what NCCL runs on the current stream, where there is nothing to wait for.
    """

    def __init__(
        self,
        log: Log,
        blocks: bool,
        channel: int,
        buffers: object,
        works: Sequence[dist.Work | None],
        result: Any = None,
        times: float = 1,
    ) -> None:
        self._log, self._channel, self._buffers = log, channel, buffers
        self._works, self._result, self._times, self._blocks = works, result, times, blocks

    def wait(self) -> Any:
        if self._log.failure.broken:
            self._log.failure.refuse_if_broken(self._buffers)
        try:  # not `Operation`, which costs two calls in each wait
            for work in filter(None, self._works):
                if self._blocks:
                    wait_watching(work, self._log)
                else:
                    work.wait()
        except BaseException as error:
            self._log.failure.of_transfer(self._channel, self._buffers, error)
            raise
        self._buffers, self._works = None, ()  # what was sent is freed before the result gets memory
        return self._result if self._times == 1 else self._result.mul_(self._times)


def wait_watching(work: dist.Work, log: Log) -> None:
    """Waits in intervals, and looks in between whether another rank is known to be missing."""
    for interval in chain(_INTERVALS, repeat(_INTERVALS[-1])):
        try:
            work.wait(interval)
            return
        # A wait that runs out raises it, too, and may be tried again: of a collective of Gloo it leaves all as it was.
        # (Of a `send` or `recv` it closes all connections: there are none here. tests/comm/test_slow.py)
        except RuntimeError:
            if work.is_completed():
                break
            log.failure.refuse_if_broken()
    work.wait()  # raises why it failed; nothing if it was completed just after the interval


class SumWork(Work):
    """add: of a transport, sums what `received` brings, with a factor."""

    def __init__(self, add: Callable[[Sequence[Tensor], float], Tensor], received: Work, times: float) -> None:
        self._add, self._received, self._times = add, received, times

    def wait_for_sent(self) -> bool:
        self._received = Work(self._received.wait())
        return True

    def wait(self) -> Tensor:
        return self._add(self._received.wait(), self._times)


# ----------------------------------------------------------------------------------------------------------- transports


Message = tuple[Tensor, Sequence[int]]
"""A flat tensor, and the number of its elements that go to each rank, in rank order."""


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
        """Sums over the ranks the elements sent to this rank, of which all ranks have the same counts. `wait` returns
        `times` the sums, flat, one message after another, of 16-bit floats in float32, on the CPU in rank order."""

    @abstractmethod
    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        """Sends other ranks their elements of the flat `sent`, and fills the flat `into` by what they send to this one,
        both in rank order. Each rank has counts of its own, of which the one for itself is 0."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        """Overwrites the contiguous tensor with `times` the sum, or with the maximum, over the ranks. `wait` returns
        its elements."""

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

    def exchange(self, into: Tensor, sent: Message, counts_in: Sequence[int], channel: int) -> Work:
        return Work()

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        return Work(tensor)

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
