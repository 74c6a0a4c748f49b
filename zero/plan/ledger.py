"""Bytes as they come and go in a step."""

from __future__ import annotations


class Ledger:
    """Adds up what is held, and remembers the most."""

    def __init__(self, held: int = 0) -> None:
        self.held = self.peak = held

    def take(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def give(self, nbytes: int) -> None:
        self.held -= nbytes

    def touch(self, nbytes: int) -> None:
        """Takes and gives back at once."""
        self.peak = max(self.peak, self.held + nbytes)
