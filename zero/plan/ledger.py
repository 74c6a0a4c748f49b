"""Bytes as they come and go in a step."""

from __future__ import annotations


class Ledger:
    """Adds up what is held, and remembers the most."""

    def __init__(self, held: int) -> None:
        self.held = self.peak = held
        self._computing = 0

    def take(self, nbytes: int) -> None:
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held

    def give(self, nbytes: int) -> None:
        self.held -= nbytes

    def touch(self, nbytes: int) -> None:
        """Takes and gives back at once."""
        if self.held + nbytes > self.peak:
            self.peak = self.held + nbytes

    def compute(self, before: int, after: int) -> None:
        """The model's own computation goes on: it has held `before` at most, of which `after` is left."""
        self.held -= self._computing
        self.touch(before)
        self._computing = after
        self.take(after)

    def end_backward(self) -> None:
        self.compute(0, 0)
