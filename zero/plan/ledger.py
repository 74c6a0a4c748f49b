"""Bytes as they come and go in a step."""

from __future__ import annotations

from collections.abc import Sequence

from zero.plan.needs import Activations


class Ledger:
    """Adds up what is held, and remembers the most.

    activations: what a model's own forward and backward hold as gradients arrive.
    """

    def __init__(self, held: int, activations: Activations) -> None:
        self.held = self.peak = held
        self._activations = activations
        self._left = 0

    def take(self, nbytes: int) -> None:
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held

    def give(self, nbytes: int) -> None:
        self.held -= nbytes

    def touch(self, nbytes: int) -> None:
        """Takes and gives back at once."""
        self.peak = max(self.peak, self.held + nbytes)

    def forward(self) -> None:
        """A forward, or as much of it as is run at once."""
        self.touch(self._activations.forward)

    def arrive(self, names: Sequence[str], gradients: Sequence[int], *, held: bool = True) -> None:
        """Backward computes one gradient after another; activations go as it proceeds.

        held: whether the gradients stay; otherwise each goes once it has arrived, into a bucket that is there already.
        """
        if not self._activations.order:
            if held:
                self.take(sum(gradients))
            else:
                self.touch(max(gradients, default=0))
            return
        for name, gradient in zip(names, gradients, strict=True):
            self.give(self._left)
            self.touch(self._activations.before.get(name, 0))
            self._left = self._activations.after.get(name, 0)
            self.take(gradient + self._left)
            self.give(0 if held else gradient)

    def end_backward(self) -> None:
        self.give(self._left)
        self._left = 0
