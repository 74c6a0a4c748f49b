"""Which unit's gradients are sent when.

due      its backward is complete; sent once the unit that comes next is being gathered
sent     on the way; waited for before the next is sent
"""

from __future__ import annotations

from typing import Protocol


class Reduced(Protocol):
    """What is needed of a Unit."""

    def launch_reduce(self) -> None: ...

    def finish_reduce(self) -> None: ...


class Reductions:
    """The gradients of one unit that is due, and of one whose gradients are sent."""

    def __init__(self) -> None:
        self._due: Reduced | None = None
        self._sent: Reduced | None = None

    def put(self, unit: Reduced) -> None:
        """Collective. The unit's gradients are in its buckets, due to be sent."""
        self.send()
        self._due = unit

    def send(self) -> None:
        """Collective. Sends what is due."""
        if self._due is not None:
            self.finish()
            self._due.launch_reduce()
            self._sent, self._due = self._due, None

    def finish(self) -> None:
        """Waits for what was sent."""
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent.finish_reduce()

    def finish_of(self, unit: Reduced) -> None:
        """Collective. Sends what the unit has due, and waits for it: backward has come to the unit again."""
        if self._due is unit:
            self.send()
        if self._sent is unit:
            self.finish()

    def finish_all(self) -> None:
        """Collective."""
        self.send()
        self.finish()

    def abandon(self) -> None:
        self._due = self._sent = None
