"""The interface of every way of sending. Nobody above it knows which one runs.

`channel` is the number of an operation (order.py), by which ranks out of step get an error on each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from zero.comm.handle import Handle

Message = tuple[Tensor, Sequence[int]]
"""A flat tensor, and how many elements of it go to each rank, in the order of ranks: the same numbers on all ranks."""


class Transport(ABC):
    """How the ranks of one group send tensors that lie on one type of device.

    All but `overlaps` and `name` is collective. Tensors that were given must not change until the call, or the handle's
    `wait`, has returned. Each call is compared between ranks as order.py says, and raises RuntimeError on every rank
    where they differ.
    """

    name: str
    """For logs."""
    overlaps: bool
    """Whether transfers run beside the computing, without taking the processor from it. A reduce then costs as many
    kernels whatever the number of ranks where it is of one message."""

    @abstractmethod
    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        """Fills the flat `full`: elements [bounds[r], bounds[r + 1]) come from rank r, which has them there."""

    @abstractmethod
    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Handle:
        """Sums over the ranks what each has for this rank. `wait` returns the sums, flat, one message after another: a
        new tensor, float32 of 16-bit floats, or `into`. On the CPU they are added in rank order.

        times: what sums are multiplied by. into: flat, may be what this rank has for itself.
        """

    @abstractmethod
    def all_to_all(self, messages: Sequence[Message], channel: int) -> Handle:
        """`wait` returns, of one message after another, what every rank has for this rank, one row a rank."""

    @abstractmethod
    def broadcast(self, flat: Tensor, source: int) -> None:
        """Overwrites the tensor by that of rank `source`."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, channel: int, *, maximum: bool) -> None:
        """Overwrites the contiguous tensor by the sum, or the maximum, over the ranks."""

    @abstractmethod
    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        """Brings flat tensors from their owners to rank `to`, or (None) to all. See Comm.collect."""

    @abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gives, as many bytes on each, at least one; by rank."""

    @abstractmethod
    def compare(self, channel: int, *, flag: bool = False) -> bool:
        """Compares the operation that ranks have come to, and their logs. Returns whether any rank has the flag."""
