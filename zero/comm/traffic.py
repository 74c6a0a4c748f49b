"""Bytes that this process sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload that this rank sent. A segment that goes to W - 1 other ranks counts W - 1 times.

    What the other ranks of a host read from this rank's memory counts as sent. Not counted: how a process group's ranks
    first learn of each other, by which they see that they are in step, and what frames or pads a message.
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


_sent: Counter[str] = Counter()


def traffic() -> Traffic:
    """What this process has sent through `zero` so far; subtract two readings to see what lies between.

    What others send, such as the all-reduce of `DistributedDataParallel`, is not in it.
    """
    return Traffic(**_sent)


def count(*, gather: int = 0, reduce: int = 0, other: int = 0) -> None:
    """Adds to what this process has sent; some thousand times a step where layers are small."""
    _sent["gather"] += gather
    _sent["reduce"] += reduce
    _sent["other"] += other


@contextmanager
def rehearsed_traffic() -> Iterator[None]:
    """What is sent in here is sent by nobody: `traffic` shows it from 0 on, and forgets it afterwards."""
    global _sent
    before, _sent = _sent, Counter()
    try:
        yield
    finally:
        _sent = before
