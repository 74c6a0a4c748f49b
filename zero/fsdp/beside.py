"""Orders the computing of units with their transfers on devices where these have streams (zero.comm.streams)."""

from __future__ import annotations

from collections.abc import Sequence

from zero.comm.streams import Streams
from zero.fsdp.unit import Unit


class Beside:
    """Orders the computing of one model's units with its transfers. Does nothing on the CPU."""

    def __init__(self, units: Sequence[Unit]) -> None:
        streams = {group.streams for unit in units for group in unit.groups}
        self._streams = [entry for entry in streams if isinstance(entry, Streams)]

    def begin(self) -> None:
        """Begins a forward or backward of the model. Its all-gathers see everything that was computed before."""
        for streams in self._streams:
            streams.begin()

    def settle(self) -> None:
        """Waits until the host may read and write shards and their gradients."""
        for streams in self._streams:
            streams.settle()

    def expect(self, unit: Unit) -> None:
        """Raises RuntimeError if the unit is about to compute on a stream that transfers are not ordered with."""
        for streams in self._streams:
            streams.expect_computing(f"{unit.title} of FSDP runs")
