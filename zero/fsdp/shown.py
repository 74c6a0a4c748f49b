"""Shows DTensors in place of the plain parameters of units while these run."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import proxy

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.fsdp.unit import Index, Unit
from zero.tensor_parallel.shown import Shown, Slot, slots_of
from zero.wrap.dtensor_checks import watch_steps

_OUTSIDE = (
    "parameters of {} are read outside of its forward. They are DTensors, which the unit's modules see only while one "
    "of them runs. Put the module that reads them and the unit into one unit, by auto_wrap_policy or as_one_unit."
)


class ShownUnits:
    """Shows the parameters of each unit of an FSDP while the unit runs."""

    def __init__(self, index: Index) -> None:
        watch_steps()
        self._index: Index = proxy(index)  # which keeps the units, and these keep this
        innermost = {module: unit for unit in index.units for module in unit.module.modules()}
        slots: dict[Unit, list[Slot]] = {}
        holders: dict[Unit, set[nn.Module]] = {}
        for module, unit in innermost.items():
            if own := slots_of(module):
                slots.setdefault(unit, []).extend(own)
                holders.setdefault(unit, {unit.module}).add(module)
        self._hooks: list[RemovableHandle] = []
        for unit, own in slots.items():
            unit.shown = Shown(own, self._refuse_sharded)
            self._hooks += unit.shown.watch(holders[unit])

    def _refuse_sharded(self, params: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError for a tied parameter of a unit around this one that does not run."""
        for param in params:
            if param in self._index and not (unit := self._index.unit_of(param)).readable:
                raise RuntimeError(_OUTSIDE.format(unit.title))

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._index.units:
            if unit.shown is not None:
                unit.shown.hide()
                unit.shown = None


def refuse_read(unit: Unit) -> None:
    """Raises RuntimeError for a unit that another one reads, if its parameters are DTensors."""
    if unit.shown is not None:
        raise RuntimeError(_OUTSIDE.format(unit.title))
