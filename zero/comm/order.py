"""The order of operations on one process group: their numbers, whether ranks come to the same ones, and whether the
group can still be used.

A number stands for an operation and for what is announced to follow it: what is not compared by itself, such as a
reduce, is safe to launch once an operation that announced it was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero.comm.handle import Handle

_BITS = 31
"""Of the number of an operation; the rest are those of what is announced to follow it."""

COMPARISON, SUM, BROADCAST, COLLECTION, GATHER, REDUCTION = range(6)
"""Operations that every process group knows."""


class Order:
    """One a process group and process.

    queue: the transfers in flight that are to be completed in the order in which they were launched.
    announced: the channel of what follows the operations to come.
    broken: why nothing more can be sent. A transfer that failed breaks the order: nothing that was in flight counts as
        arrived, and whatever is asked for afterwards raises with the first cause.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self.queue: list[Handle] = []
        self.announced = 0
        self.broken: str | None = None
        self.at_failure: list[Callable[[], object]] = []
        """Called when a transfer has failed."""
        self._stranded: list[Any] = []
        """Buffers of transfers that failed, into which messages may still be written."""
        self._names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a collection",
            "a gather",
            "a reduction",
        ]

    def channel(self, name: str) -> int:
        """A number for one stream of operations, given out in the same order on every rank; `name` is for errors."""
        self._names.append(name)
        return len(self._names) - 1

    def number(self, channel: int) -> int:
        """What is compared of an operation: which it is, and what was announced to follow it."""
        return channel + (self.announced << _BITS)

    def name(self, number: int) -> str:
        """What an operation is called, and what was announced to follow it."""
        announced, channel = divmod(number, 1 << _BITS)
        name = self._names[channel] if channel < len(self._names) else f"operation number {channel}"
        return f"{name} (next: {self._names[announced]})" if 0 < announced < len(self._names) else name

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(f"{self.broken} Start the process group anew before going on.")

    def refuse_others(self, number: int, numbers: Mapping[int, int]) -> None:
        """numbers: by rank, of the operation that each other rank has come to; `number` is this rank's."""
        different = [peer for peer, theirs in numbers.items() if theirs != number]
        if different:
            peers = ", ".join(f"rank {peer} in {self.name(numbers[peer])}" for peer in different)
            self.broken = (
                f"ranks are out of step: rank {self._rank} is in {self.name(number)}, but {peers}. All ranks "
                "must run the same modules in the same order and take the same steps. Modules that ranks choose "
                "between must be gathered together: FSDP(as_one_unit=...)."
            )
            raise RuntimeError(self.broken)

    def transfer(self, number: int | None, buffers: object) -> Transfer:
        """A context for the part of a transfer that can fail. It keeps the buffers of one that does alive: they may
        still be written into, or read."""
        return Transfer(self, number, buffers)

    def fail(self, number: int | None, buffers: object, error: BaseException) -> str:
        """After the error of a transfer. Returns what to say of it."""
        self._stranded.append(buffers)
        where = "a transfer" if number is None else self.name(number)
        said = (
            f"rank {self._rank} waited in vain in {where}: another rank of the group of {self._world} has stopped, "
            f"or never came here. Look for the first error of any rank. ({error})"
        )
        self.broken = self.broken or said
        for act in self.at_failure:
            act()
        return said


class Transfer:
    """A context. Not a generator, which takes three times as long: every transfer enters a few."""

    __slots__ = ("_buffers", "_number", "_order")

    def __init__(self, order: Order, number: int | None, buffers: object) -> None:
        self._order, self._number, self._buffers = order, number, buffers

    def __enter__(self) -> None:
        self._order.refuse_if_broken()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            said = self._order.fail(self._number, self._buffers, error)
            if isinstance(error, (RuntimeError, OSError)):  # not Ctrl-C
                raise RuntimeError(said) from error
