"""Warns in the first forward of a large model of which one unit holds more than half."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero._torch import warn_user
from zero.fsdp.events import ModelEvents, model_events
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit
from zero.fsdp.units import largest_unit

LARGE_MODEL = 50_000_000
"""Number of parameters up to which a model is small: it may be one unit."""


class WarnsOfLargeUnit(ModelEvents):
    """Not in the constructor of the FSDP: another around it may choose other units."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        warns = model.comm.world > 1 and model.placement.first
        self._warning = large_unit(model.units, type(model.module).__name__, model.as_one_unit) if warns else None

    def forward_begins(self) -> None:
        warning, self._warning = self._warning, None
        if warning is not None:
            warn_user(warning)


def large_unit(units: Sequence[Unit], model: str, as_one_unit: Sequence[nn.Module | type[nn.Module]]) -> str | None:
    """Returns a warning if one unit holds over half of a large model, unless the caller asked for this unit, or other
    units could not divide it because one of its layers holds as much. Else None. model: the name of its class."""
    full = {
        param: numel
        for unit in units
        for group in unit.groups
        for param, numel in zip(group.params, group.layout.numels, strict=True)
    }
    total = sum(full.values())
    largest, share = largest_unit(units)
    layers = [[*module.parameters(recurse=False)] for module in largest.module.modules()]
    divisible = all(2 * sum(full.get(param, 0) for param in layer) <= total for layer in layers)
    asked = any(largest.module is one or type(largest.module) is one for one in as_one_unit)
    if total <= LARGE_MODEL or 2 * sum(full[param] for param in largest.params) <= total or asked or not divisible:
        return None
    return (
        f"{largest.title} of FSDP({model}) holds {share} of the model's parameters: each rank gathers these "
        "at once, and has their gradients at once. Choose smaller units, such as the layers that the model repeats, by "
        "their class: auto_wrap_policy=ModuleWrapPolicy({Block})."
    )


model_events.append(WarnsOfLargeUnit)
