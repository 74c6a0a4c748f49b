"""The interface of all transports, the handle of a transfer, and the transport of a group of one rank.

Code above does not know which transport runs. `channel` is the number of an operation (order.py). Ranks compare it, so
that all raise when they are out of step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zero.comm.packing import concatenate, wide

Message = tuple[Tensor, Sequence[int]]
"""A flat tensor, and the number of its elements that go to each rank, in rank order: the same numbers on all ranks."""


class Handle:
    """A transfer in flight. It owns the buffers until `wait` has returned the result.

    queue: the transfers that compare or launch operations in `wait`. They are completed in the order of their launches,
        so that this order is the same on every rank, whichever handle a rank waits for first.
    """

    def __init__(self, finish: Callable[[], Any], queue: list[Handle] | None = None) -> None:
        self._finish = finish
        self._queue = queue
        self._result: Any = None
        self._error: BaseException | None = None
        self._waited = False
        if queue is not None:
            queue.append(self)

    def wait(self) -> Any:
        """Waits for the transfer and returns its result. Must not be called again after it has returned.

        Raises the error of the transfer, also if it came up in the `wait` of another handle.
        """
        assert not self._waited, "this transfer was waited for before"
        while self._queue and self in self._queue:
            self._queue.pop(0)._complete()
        if self._error is not None:
            raise self._error
        if self._queue is None:
            self._result = self._finish()
        self._waited, self._finish = True, _nothing
        result, self._result = self._result, None
        return result

    def _complete(self) -> None:
        finish, self._finish = self._finish, _nothing
        try:
            self._result = finish()
        except BaseException as error:
            self._error = error
            raise


def _nothing() -> None: ...


class Transport(ABC):
    """Sends tensors on one type of device between the ranks of one group.

    All methods are collective. The tensors passed in must not change until the call, or `wait` of the returned handle,
    has returned. Ranks compare each call as order.py says; where they differ, it raises RuntimeError on every rank.
    """

    name: str
    """The name shown in logs."""
    overlaps: bool
    """Whether transfers run beside the computing, without taking the processor from it. The number of kernels of a
    reduce of one message then does not depend on the number of ranks."""

    reads = False
    """Whether ranks read from one another's memory."""

    @abstractmethod
    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        """Fills the flat `full`. Rank r sends elements [bounds[r], bounds[r + 1]), which its own `full` holds."""

    @abstractmethod
    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Handle:
        """Sums over the ranks the elements sent to this rank. `wait` returns `times` the sums, flat, one message after
        another: a new tensor (float32 for 16-bit floats), or the flat `into`, which may overlap this rank's share of
        the messages. On the CPU they are added in rank order."""

    @abstractmethod
    def all_to_all(self, messages: Sequence[Message], channel: int) -> Handle:
        """Sends each rank its elements. `wait` returns for each message the elements from all ranks, one row a rank."""

    @abstractmethod
    def broadcast(self, flat: Tensor, source: int) -> None:
        """Overwrites the tensor with that of rank `source`."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, channel: int, *, maximum: bool) -> None:
        """Overwrites the contiguous tensor with the sum, or the maximum, over the ranks."""

    @abstractmethod
    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        """Sends flat tensors from their owners to rank `to`, or (None) to all ranks. See Comm.collect."""

    @abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """Returns the data of every rank, by rank. All ranks pass the same number of bytes, at least one."""

    @abstractmethod
    def compare(self, channel: int, *, flag: bool = False) -> bool:
        """Compares between ranks this operation and the logs. Returns whether any rank has the flag."""


class Local(Transport):
    """The transport of a group of one rank."""

    name, overlaps = "this process alone", False

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        return Handle(lambda: None)

    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Handle:
        def own() -> Tensor:
            sums = wide(concatenate([message for message, _ in messages]))
            sums = sums if times == 1 else sums * times
            return sums if into is None else into.copy_(sums)

        return Handle(own)

    def all_to_all(self, messages: Sequence[Message], channel: int) -> Handle:
        return Handle(lambda: [message.unsqueeze(0) for message, _ in messages])

    def broadcast(self, flat: Tensor, source: int) -> None: ...

    def all_reduce(self, tensor: Tensor, channel: int, *, maximum: bool) -> None: ...

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None: ...

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def compare(self, channel: int, *, flag: bool = False) -> bool:
        return flag
