"""autocast's cache of cast parameters, which exists as long as autocast is enabled.

Later forwards compute with the same casts. The gradients of these casts pass through the graph of the forward that cast
first, so they come later in backward than all other gradients of the later forward.
"""

from __future__ import annotations

import torch

from zero.fsdp.events import ModelEvents, model_events
from zero.fsdp.model import Model


class Casts(ModelEvents):
    """Tracks autocast's casts of the parameters of one model."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._device = next(iter(model.index)).device.type
        self._shared = False
        """Whether the running forward may compute with casts of an earlier one whose backward is still to come."""

    def forward_begins(self) -> None:
        """Drops casts of forwards whose backward is over."""
        expected = any(unit.calls for unit in self.model.units)
        self._shared = expected and torch.is_autocast_enabled(self._device)
        if not expected:
            torch.clear_autocast_cache()

    def gradients_may_be_late(self) -> bool:
        return self._shared


model_events.append(Casts)
