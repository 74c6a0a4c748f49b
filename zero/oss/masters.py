"""Masters: this rank's parts of the parameters in a dtype of more bits, which the optimizer steps in their place.

A master is flat, of the length of this rank's segment of a flat group, and lies beside it. The parameters are the
rounded masters: after a step a master is written into them, and before a step what was written into them since (loaded
weights) is taken over, for there it is the master that is out of date.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.oss.flat import FlatGroup


class Masters:
    """The masters of flat groups whose dtype has fewer bits than `dtype`; of none where that is None."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._masters: dict[FlatGroup, Tensor] = {}

    def __len__(self) -> int:
        return len(self._masters)

    def add(self, flat: FlatGroup) -> Tensor:
        """What is stepped of a flat group: a master, if there is to be one, otherwise its part. Flat."""
        if self._dtype is None or self._dtype.itemsize <= flat.full.element_size():
            return flat.part
        self._masters[flat] = flat.part.to(self._dtype)
        return self._masters[flat]

    def of(self, flat: FlatGroup) -> Tensor | None:
        return self._masters.get(flat)

    def settled(self, flat: FlatGroup) -> Tensor | None:
        """A master as the next step takes it; see `settled`."""
        master = self._masters.get(flat)
        return None if master is None else settled(master, flat.part)

    def refresh(self) -> None:
        """Takes over what was written into the parameters since the last `write`."""
        for flat, master in self._masters.items():
            torch.where(_written(flat.part, master), flat.part.to(master.dtype), master, out=master)

    def write(self) -> None:
        """Writes the masters into this rank's parts of the parameters, rounded."""
        for flat, master in self._masters.items():
            flat.part.copy_(master)


def settled(master: Tensor, part: Tensor) -> Tensor:
    """A master as the next step takes it: where something else was written into the parameters, that.

    Where nothing was, the master itself. It is not written to: the weights that belong to it may be loaded after it.
    """
    written = _written(part, master)
    return torch.where(written, part.to(master.dtype), master) if written.any() else master


def _written(part: Tensor, master: Tensor) -> Tensor:
    return part != master.to(part.dtype)
