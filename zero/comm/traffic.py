"""Counts the bytes that this process has sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload that this rank sent. A tensor that goes to W - 1 other ranks counts W - 1 times.

    Bytes that other ranks of the host read from this rank's memory count as sent. Not counted are the rendezvous of a
    process group's ranks, the comparison of their operations, and the headers and the padding of messages.
    """

    gather: int = 0
    reduce: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.other

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(self.gather + more.gather, self.reduce + more.reduce, self.other + more.other)

    def __sub__(self, less: Traffic) -> Traffic:
        return Traffic(self.gather - less.gather, self.reduce - less.reduce, self.other - less.other)


sent: Counter[str] = Counter()
"""Bytes that this process has sent, by the fields of Traffic. Transports' callers add to it."""


def traffic() -> Traffic:
    """Returns the bytes that this process has sent through `zero` so far; subtract two results for those in between.

    Transfers of other libraries, such as the all-reduce of `DistributedDataParallel`, are not counted.
    """
    return Traffic(**sent)
