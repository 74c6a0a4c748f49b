"""Accelerate's optimizer, around an optimizer whose state is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from zero.fsdp import FSDP


class ShardedAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Loads full state, at every stage. Moves no state: it is on the shards' device.

    before_step: called before each real step, and not before those that only accumulate.
    holder: returns the wrapper that holds the parameters, if it is known.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: Any,
        before_step: Callable[[Optimizer], None],
        holder: Callable[[Optimizer], Any],
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._before_step, self._holder = before_step, holder

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Collective."""
        if self.gradient_state.sync_gradients:
            self._before_step(self.optimizer)
        super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads full state, or this rank's own."""
        holder = self._holder(self.optimizer)
        if isinstance(holder, FSDP):
            holder.load_optim_state_dict(self.optimizer, state_dict)
        else:
            self.optimizer.load_state_dict(state_dict)
