"""Which unit's gradients are sent when.

due      its backward is complete; sent once the unit that comes next is being gathered
sent     on the way; waited for before the next is sent
"""

from __future__ import annotations

from collections.abc import Callable

from zero.fsdp.unit import Unit


class Reductions:
    """The gradients of one unit that is due, and of one whose gradients are sent. finished: called when they came."""

    def __init__(self, finished: Callable[[Unit], None]) -> None:
        self._finished = finished
        self._due: Unit | None = None
        self._sent: Unit | None = None

    def put(self, unit: Unit) -> None:
        """Collective. The unit's gradients are in its buckets, due to be sent."""
        self.send()
        self._due = unit

    def send(self) -> None:
        """Collective. Sends what is due."""
        if self._due is not None:
            self.finish()
            self._due.gradients.launch()
            self._sent, self._due = self._due, None

    def finish(self) -> None:
        """Waits for what was sent."""
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent.gradients.finish(sent.title)
            self._finished(sent)

    def finish_of(self, unit: Unit) -> None:
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
