"""The state of an OSS, cached until the next step."""

from __future__ import annotations

from typing import Any

from torch import nn

from zero._torch import asked_by_torch_checkpoint
from zero.measure.param_groups import params_of
from zero.oss.saved import makers
from zero.state import optimizer_state as state


class Saved:
    """See SavedState. torch.distributed.checkpoint gets the full state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._full: dict[str, Any] | None = None
        """The full state, if it was consolidated here since the last step."""
        self._full_for_torch: dict[str, Any] | None = None

    @property
    def asked_for_full(self) -> bool:
        return asked_by_torch_checkpoint()

    def forget(self) -> None:
        self._full = self._full_for_torch = None

    def consolidate(self, to: int | None) -> None:
        self._full = state.consolidate(self.optimizer, to)

    def of_params(self) -> dict[nn.Parameter, dict[str, Any]]:
        params = params_of(self.optimizer)
        return {params[number]: kept for number, kept in self._for_torch()["state"].items()}

    def state_dict(self) -> dict[str, Any]:
        full = self._for_torch() if self.asked_for_full else self._full
        if full is None or self.optimizer.comm.world == 1:
            return state.shard_of(self.optimizer)
        return {**full, "param_groups": state.numbered_groups(self.optimizer)}

    def _for_torch(self) -> dict[str, Any]:
        """Collective the first time after a step; torch asks once for each parameter."""
        if self._full_for_torch is None:
            self._full_for_torch = state.consolidate(self.optimizer, None)
        assert self._full_for_torch is not None
        return {**self._full_for_torch, "state": dict(self._full_for_torch["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state.load(self.optimizer, state_dict)
        self.forget()

    def gathered(self) -> Any:
        return state.consolidate(self.optimizer, None, settle=False)

    def restore(self, full: Any) -> None:
        state.load(self.optimizer, full)

    def take(self, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        state.hand_over(self.optimizer, taken, groups)
        self.forget()


makers.append(Saved)
