"""What lies between ranks for a while: units made whole, and gradients on their way to their owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zero.plan.job import Job
from zero.plan.layouts import Bucket
from zero.plan.ledger import Ledger


class Gathering:
    """Units made whole and parts again, as FlatGroup does it.

    kept: units stay whole from forward to backward, and give up their parts meanwhile.
    """

    def __init__(self, job: Job, ledger: Ledger, *, kept: bool) -> None:
        self._job, self._ledger, self._kept = job, ledger, kept
        self.sent = 0

    def unshard(self, unit: Sequence[Bucket]) -> None:
        held, told = self._job.agreement
        for bucket in unit:  # all are launched before one is waited for
            self._ledger.take(bucket.flat.whole + held)
            self.sent += bucket.flat.gathered * (self._job.world - 1) + told
        for bucket in unit:
            self._ledger.give(held + self._given_up(bucket))

    def reshard(self, unit: Iterable[Bucket]) -> None:
        for bucket in unit:
            self._ledger.take(self._given_up(bucket))
            self._ledger.give(bucket.flat.whole)

    def agree(self) -> None:
        """An operation that only says where this rank is."""
        held, told = self._job.agreement
        self._ledger.touch(held)
        self.sent += told

    def _given_up(self, bucket: Bucket) -> int:
        flat = bucket.flat
        return flat.part if self._kept and flat.part == flat.gathered else 0


class Reduction:
    """Gradients of one bucket, or of one unit, on their way to their owners, as GradBucket sends them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight: list[tuple[Bucket, int]] = []
        self.kept = 0
        """Bytes of gradients that this rank has of all that came."""

    def launch(self, bucket: Bucket) -> None:
        """The gradients as autograd wrote them are held already."""
        flat = bucket.flat
        if not flat.taken:
            return
        self._ledger.take(flat.cast)
        self._ledger.take(flat.small_written)
        self._ledger.take(flat.small)
        stay = flat.cast or flat.alone
        self._ledger.give(flat.cast + flat.small_written + flat.taken - stay)
        self._ledger.take(flat.received)
        self._in_flight.append((bucket, stay + flat.small + flat.received))

    def finish(self) -> None:
        for bucket, held in self._in_flight:
            flat = bucket.flat
            self._ledger.take(flat.sums)
            self._ledger.touch(flat.pieces + flat.widened)
            self._ledger.give(held)
            if flat.sums_dtype is bucket.stepped:
                self.kept += flat.sums
            else:
                kept = flat.owned * bucket.stepped.itemsize
                self._ledger.take(kept)
                self._ledger.give(flat.sums)
                self.kept += kept
        self._in_flight = []
