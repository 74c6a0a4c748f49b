"""The seam at which the state of the user's optimizer is saved and loaded in full."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from zero.fsdp.model import Model


class OptimizerState:
    """Saves nothing. zero/state puts its own into `states`. optimizer: it steps shards of the model."""

    def full(self, model: Model, optimizer: Optimizer, to: int | None) -> dict[str, Any] | None:
        """Collective. See FSDP.optim_state_dict."""
        self._refuse()

    def load(self, model: Model, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """See FSDP.load_optim_state_dict."""
        self._refuse()

    def register(self, model: Model, optimizer: Optimizer) -> None:
        """Has the optimizer's own `load_state_dict` take full state."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("state of optimizers is saved and loaded by zero/state, which is missing.")


states: list[OptimizerState] = [OptimizerState()]
"""The last one is asked."""
