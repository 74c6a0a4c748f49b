"""What is computed from parameters at rest, such as a penalty on weights that is added to the loss.

At rest a parameter is this rank's part, and so is the gradient of what is computed from it: it is added to `param.grad`
as it is, not averaged. Of a sum over elements the ranks' parts together get the gradient of the whole.

The node by which autograd accumulates the gradient of a leaf keeps the shape that the leaf had when the node was made,
and is used for all reads while it lives. So that reads of a part and of the whole have nodes of their own, parameters
let go of theirs where they become the one or the other; graphs hold on to them. torch does this where data of another
dtype is set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.fsdp.unit import Unit
from zero.oss.flat import FlatGroup, Residence


class RestingReads:
    """Keeps reads of units' parts apart from those by their modules."""

    def __init__(self) -> None:
        self._entered: dict[Unit, None] = {}
        """Units whose modules have read them since the outermost forward began."""
        self._other: dict[FlatGroup, Tensor] = {}
        """Of each group a tensor of another dtype, without elements."""

    def enter(self, unit: Unit) -> None:
        """Before the unit is made whole in forward. Graphs from before may still hold nodes of reads at rest."""
        if torch.is_grad_enabled() and unit not in self._entered:
            self._entered[unit] = None
            self._renew(unit)

    def leave(self) -> None:
        """After the outermost forward, or at the end of backward: what is at rest again may be read so."""
        self._entered = {unit: None for unit in self._entered if not self._renew(unit)}

    def forget(self) -> None:
        self._entered.clear()

    def _renew(self, unit: Unit) -> bool:
        """Returns whether the unit is at rest."""
        at_rest = True
        for group in unit.groups:
            if group.residence is Residence.WHOLE:
                at_rest = False
            elif _one_kind(group):
                other = self._other_dtype(group)
                for param, view in zip(group.params, group.part_views, strict=True):
                    if param.requires_grad:
                        param.data = other
                        param.data = view
        return at_rest

    def _other_dtype(self, group: FlatGroup) -> Tensor:
        if group not in self._other:
            dtype = torch.float16 if group.part.dtype != torch.float16 else torch.float32
            self._other[group] = group.part.new_empty(0, dtype=dtype)
        return self._other[group]


def _one_kind(group: FlatGroup) -> bool:
    """Whether parts are of the same dtype and device as the whole, so that torch would keep the node."""
    part, full = group.part, group.full
    return group.comm.world > 1 and (part.dtype, part.device) == (full.dtype, full.device)
