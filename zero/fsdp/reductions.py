"""Which unit's gradients are sent when, so that all ranks send the same.

A reduce is not compared between ranks by itself. The next operation that is compared, mostly the gathering of the next
unit, announces it, and the reduce is launched when that has arrived.

    due      its backward is complete; the reduce is announced with the operation that follows
    sent     on the way; waited for before the next is sent
"""

from __future__ import annotations

from typing import Protocol


class Ranks(Protocol):
    """What is needed of a Comm."""

    def channel(self, name: str) -> int: ...

    def announce(self, channel: int | None) -> None: ...

    def agree(self, channel: int) -> None: ...


class Reduced(Protocol):
    """What is needed of a Unit."""

    @property
    def reduce_channel(self) -> int | None: ...

    def finish_unshard(self) -> None: ...

    def launch_reduce(self) -> None: ...

    def finish_reduce(self) -> None: ...


class Reductions:
    """The gradients of one unit that is due, and of one whose gradients are sent."""

    def __init__(self, comm: Ranks) -> None:
        self._comm = comm
        self._channel = comm.channel("the backward of FSDP")
        self._due: Reduced | None = None
        self._sent: Reduced | None = None
        self._announced_by: Reduced | None = None
        """The unit whose gathering, still under way, announces what is due."""

    def put(self, unit: Reduced) -> None:
        """Collective. The unit's gradients are in its buckets, to be sent with the next operation."""
        if self._due is not None:
            self.flush()
        self._due = unit
        self._comm.announce(unit.reduce_channel)

    def gathering(self, unit: Reduced) -> None:
        """A gathering of the unit was launched, and has announced what is due."""
        if self._due is not None and self._announced_by is None:
            self._announced_by = unit

    def gathered(self, unit: Reduced) -> None:
        """Collective. The gathering of the unit is complete: what it announced may be sent."""
        if self._announced_by is unit:
            self._launch()

    def flush(self) -> None:
        """Collective. Sends what is due now, after the gathering that announces it or else by an agreement to do so."""
        if self._announced_by is not None:
            self._announced_by.finish_unshard()
            self._launch()
        elif self._due is not None:
            self._comm.agree(self._channel)
            self._launch()

    def _launch(self) -> None:
        assert self._due is not None
        self.finish()
        self._comm.announce(None)
        self._due.launch_reduce()
        self._sent, self._due, self._announced_by = self._due, None, None

    def finish(self) -> None:
        """Waits for what was sent."""
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent.finish_reduce()

    def finish_of(self, unit: Reduced) -> None:
        """Collective. Sends what the unit has due, and waits for it: backward has come to the unit again."""
        if self._due is unit:
            self.flush()
        if self._sent is unit:
            self.finish()

    def finish_all(self) -> None:
        """Collective. At the end of a backward, where ranks agree that all have come."""
        if self._announced_by is not None:
            self.flush()
        self._comm.agree(self._channel)
        if self._due is not None:
            self._launch()
        self.finish()

    def abandon(self) -> None:
        self._due = self._sent = self._announced_by = None
        self._comm.announce(None)
