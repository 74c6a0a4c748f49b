"""autocast's cache of cast parameters, which exists as long as autocast is enabled.

Later forwards compute with the same casts. The gradients of these casts pass through the graph of the forward that cast
first, so they come later in backward than all other gradients of the later forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.fsdp.unit import Unit


def shares_casts(units: Sequence[Unit], device: str) -> bool:
    """Returns whether the forward that begins may compute with casts of an earlier one whose backward is still to come.
    Drops casts of forwards whose backward is over. device: the type of device that computes."""
    expected = any(unit.calls for unit in units)
    if not expected:
        torch.clear_autocast_cache()
    return expected and torch.is_autocast_enabled(device)
