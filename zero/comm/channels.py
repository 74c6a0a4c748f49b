"""The kinds of operations of a process group, each with a number, the channel, and a name for errors."""

from __future__ import annotations

from collections.abc import Mapping

from zero.comm.waiting import running_call

COMPARISON, SUM, BROADCAST, SCATTER, COLLECTION, GATHER, REDUCTION, AGREEMENT, READ = range(9)
"""Channels that every process group has."""


READ_BY_ALL = (
    "Between steps ranks have a sharded tensor together: compute its number on every rank, and print it on one, as "
    "norm = float(param.grad.norm()); if rank == 0: print(norm)."
)
"""What to do for operations by which a sharded tensor is read."""

_PARTS = 1 << 24


def part_of(channel: int, position: int) -> int:
    """The number of an operation of one of several things of a channel, which is another for each."""
    return channel + (position + 1) * _PARTS


class Channels:
    """The channels of one process group, by number. rank: this rank's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._names = [
            "a comparison of what the ranks were given",
            "a sum over the ranks",
            "a broadcast",
            "a scatter",
            "the collection of full tensors or state",
            "a gather",
            "a reduction",
            "the collection of full tensors or state",  # of Together, within which tensors are collected
            "the reading of a sharded tensor, whose elements all ranks have together",
        ]
        self._remedies = {READ: READ_BY_ALL}

    def add(self, name: str, remedy: str = "") -> int:
        """Returns a new number for a kind of operation, `name` in errors. All ranks must call it in the same order.

        remedy: a sentence for the user, if ranks are out of step in operations that all have this remedy.
        """
        self._names.append(name)
        channel = len(self._names) - 1
        self._remedies[channel] = remedy
        return channel

    def name(self, channel: int) -> str:
        """Returns the name of a channel, for errors."""
        channel, part = channel % _PARTS, channel // _PARTS
        name = self._names[channel] if channel < len(self._names) else f"operation number {channel}"
        return f"{name}, its parameter {part - 1}" if part else name

    def differing(self, channels: Mapping[int, int]) -> str:
        """Returns this rank's error for ranks that are out of step. channels: by rank, where they differ; empty if only
        the bytes of operations do."""
        difference = "their last operations moved different numbers of bytes"
        if channels:
            first, *others = channels
            operations = ", ".join(f"rank {other} in {self.name(channels[other])}" for other in others)
            difference = f"rank {first} is in {self.name(channels[first])}, but {operations}"
        remedies = {self._remedies.get(channel % _PARTS, "") for channel in channels.values()}
        # What one rank reads alone the others do not have: their operation has another remedy, or none.
        alike = READ_BY_ALL if READ_BY_ALL in remedies else remedies.pop() if len(remedies) == 1 else ""
        call = running_call()
        return (
            f"ranks are out of step: {difference}. Each of these is collective: call it on every rank, in the same "
            f"order, also to evaluate and to save. {f'Rank {self._rank} has called {call}. ' if call else ''}"
            f"{alike or 'With fewer batches on one rank than on others take them from zero.join.'}"
        )
