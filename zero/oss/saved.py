"""The seam at which the state of optimizers is saved and loaded: zero/state plugs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import nn


class SavedState(Protocol):
    """The state of one OSS. asked_for_full: whether the caller must get the full state although it did not consolidate
    it, which is collective."""

    @property
    def asked_for_full(self) -> bool: ...

    def forget(self) -> None:
        """The state may have changed."""

    def consolidate(self, to: int | None) -> None: ...

    def of_params(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns the full state by parameter, if the caller asks for it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def gathered(self) -> Any:
        """Collective. Returns the full state on every rank, in a form that `restore` takes after another layout."""

    def restore(self, full: Any) -> None: ...

    def take(self, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Loads this rank's shards of a state, by `part(param)`, and the options of the groups.

        Keeps the tensors without copying them. Master weights are not among them: write into `ShardGroup.master`.
        """


class Missing:
    """Stands in the place of zero/state while that is missing."""

    asked_for_full = False

    def forget(self) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("weights and the state of optimizers are saved and loaded by zero/state, which is missing.")


saved_states: list[Callable[[Any], SavedState]] = [lambda optimizer: Missing()]
"""The last one makes the state of each OSS."""
