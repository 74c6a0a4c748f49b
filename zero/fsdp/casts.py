"""What autocast has cast of the parameters, and keeps as long as it is on.

Later forwards compute with the same casts, whose gradients then pass through the graph of the forward that cast first:
at a later point of backward than all else of the later forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.fsdp.unit import Unit


class Casts:
    """Of the parameters of these units.

    `shared`: whether the running forward may compute with casts of one whose backward is still to come.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._device = next(param for unit in units for param in unit.params).device.type
        self.shared = False

    def before_forward(self) -> None:
        """To be called before a forward of the model. Drops the casts of forwards whose backward is over."""
        expected = any(unit.calls for unit in self._units)
        self.shared = expected and torch.is_autocast_enabled(self._device)
        if not expected:
            torch.clear_autocast_cache()
