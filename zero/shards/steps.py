"""The seam at which steps of an optimizer are taken before all gradients are there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Steps:
    """Steps nothing: the optimizer does so when the user calls it.

    A subclass that is put into `Model.steps` or `Reducer.steps` is called by the backward on every rank alike, with
    units at stage 3 and shard groups at stage 2.
    """

    def begin(self) -> None:
        """A backward that reduces its gradients begins. May raise RuntimeError."""

    def entering(self, unit: Any) -> None:
        """Backward reaches a unit, perhaps again. May raise RuntimeError."""

    def reduced(self, unit: Any) -> None:
        """The gradients of a unit or shard group are reduced, except of parameters that not all ranks have used."""

    def end(self, units: Collection[Any]) -> None:
        """The backward has ended, and all gradients are reduced."""

    def refuse(self, what: str, remedy: str) -> None:
        """Raises RuntimeError for a call that needs all gradients after backward, if there are none by then."""
