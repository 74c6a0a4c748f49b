"""The computing of units beside transfers, on devices where these have streams of their own (zero.comm.streams)."""

from __future__ import annotations

from collections.abc import Sequence

from zero.comm.streams import Streams
from zero.fsdp.unit import Unit


class Beside:
    """Of one model. On the CPU there is nothing to do."""

    def __init__(self, units: Sequence[Unit]) -> None:
        streams = {group.streams for unit in units for group in unit.groups}
        self._streams = [one for one in streams if isinstance(one, Streams)]

    def begin(self) -> None:
        """A forward or backward of the model begins."""
        for streams in self._streams:
            streams.begin()

    def settle(self) -> None:
        """The host waits until shards and their gradients are its own to read and write."""
        for streams in self._streams:
            streams.settle()

    def expect(self, unit: Unit) -> None:
        """The unit is about to compute. Raises RuntimeError where that would not be ordered with what is sent."""
        for streams in self._streams:
            streams.expect_computing(f"{unit.title} of FSDP runs")
