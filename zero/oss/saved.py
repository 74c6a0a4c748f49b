"""The seam at which an optimizer's state is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn


class SavedState:
    """Saves nothing. optimizer: an OSS. zero/state puts its own into `makers`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def asked_for_full(self) -> bool:
        """Whether the caller must get the full state although it did not consolidate it: collective."""
        return False

    def forget(self) -> None:
        """The state may have changed."""

    def consolidate(self, to: int | None) -> None:
        self._refuse()

    def of_params(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns the full state by parameter, if the caller asks for it."""
        self._refuse()

    def state_dict(self) -> dict[str, Any]:
        self._refuse()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse()

    def gathered(self) -> Any:
        """Collective. Returns the full state on every rank, in a form that `restore` takes after another layout."""
        self._refuse()

    def restore(self, full: Any) -> None:
        self._refuse()

    def take(self, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Loads this rank's shards of a state, by `part(param)`, and the options of the groups."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("state of optimizers is saved and loaded by zero/state, which is missing.")


makers: list[Callable[[Any], SavedState]] = [SavedState]
"""The last one makes the state of each OSS."""
