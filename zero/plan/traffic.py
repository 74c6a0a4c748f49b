"""What lies between ranks for a while: operations that are compared, and gradients on their way to their owners."""

from __future__ import annotations

from zero.plan.flat import Flat
from zero.plan.job import Job
from zero.plan.ledger import Ledger


class PlannedComm:
    """Operations that are compared between ranks, as Comm does it: what they hold meanwhile, and what they send."""

    def __init__(self, job: Job, ledger: Ledger) -> None:
        self._others, self._ledger = job.world - 1, ledger
        self._held, self._told = job.agreement
        self.alone = job.world == 1
        self.sent = 0

    def channel(self, name: str) -> int:
        return 0

    def agree(self, channel: int = 0) -> None:
        """An operation that only says where this rank is."""
        self._ledger.touch(self._held)
        self.sent += self._told

    def launch_gather(self, segment: int) -> None:
        """segment: bytes of this rank's."""
        self._ledger.take(self._held)
        self.sent += segment * self._others + self._told

    def finish_gather(self) -> None:
        self._ledger.give(self._held)


class Reduction:
    """Gradients of one bucket, or of one unit, on their way to their owners, as GradBucket sends them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight: list[tuple[Flat, int]] = []
        self.kept = 0
        """Bytes of gradients that this rank has of all that came."""

    def launch(self, flat: Flat) -> None:
        """The gradients as autograd wrote them are held already."""
        if not flat.taken:
            return
        self._ledger.take(flat.cast)
        self._ledger.take(flat.small_written)
        self._ledger.take(flat.small)
        stay = flat.cast or flat.alone
        self._ledger.give(flat.cast + flat.small_written + flat.taken - stay)
        self._ledger.take(flat.received)
        self._in_flight.append((flat, stay + flat.small + flat.received))

    def finish(self) -> None:
        for flat, held in self._in_flight:
            self._ledger.take(flat.sums)
            self._ledger.touch(flat.pieces + flat.widened)
            self._ledger.give(held)
            if flat.sums_dtype is flat.stepped:
                self.kept += flat.sums
            else:
                kept = flat.owned * flat.stepped.itemsize
                self._ledger.take(kept)
                self._ledger.give(flat.sums)
                self.kept += kept
        self._in_flight = []
