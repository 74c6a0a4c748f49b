"""The seam around the steps of an optimizer of shards: what is checked before and after a step; by default nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class StepCheck:
    """Checks nothing. A subclass in `checks` is made for each OSS. Error messages that it returns raise RuntimeError on
    every rank."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def changed(self) -> str | None:
        """Returns an error message if the optimizer, its groups or parameters were changed so that it cannot step."""
        return None

    def gradients(self, found: bool) -> str | None:
        """Returns an error message if the gradients cannot be stepped. found: whether there are any."""
        return None

    def begins(self) -> None:
        """The inner optimizer is about to step, or gets a closure."""

    def numbers(self) -> Tensor | None:
        """Returns float64 numbers after a step, whose maximum over the ranks is given to `judge`; None for none. On all
        ranks or none."""
        return None

    def judge(self, maxima: Tensor) -> str | None:
        """Returns an error message for the maxima of `numbers`."""
        return None

    def around_hook(self) -> AbstractContextManager[Any]:
        """Collective. Returns a context in which a hook of the user's may change gradients of shards."""
        return nullcontext()

    def closure_failed(self, error: Exception) -> None:
        """The user's closure raised an error, to which a note may be added."""


checks: list[Callable[[Any], StepCheck]] = []
