"""autocast's cache of cast parameters, which exists as long as autocast is enabled.

Later forwards compute with the same casts. The gradients of these casts pass through the graph of the forward that cast
first, so they come later in backward than all other gradients of the later forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.fsdp.unit import Unit


class Casts:
    """Tracks autocast's casts of the parameters of these units.

    `shared`: whether the running forward may compute with casts of an earlier one whose backward is still to come.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._device = next(param for unit in units for param in unit.params).device.type
        self.shared = False

    def before_forward(self) -> None:
        """Drops casts of forwards whose backward is over. Must be called before a forward of the model."""
        expected = any(unit.calls for unit in self._units)
        self.shared = expected and torch.is_autocast_enabled(self._device)
        if not expected:
            torch.clear_autocast_cache()
