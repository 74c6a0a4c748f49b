"""Shows DTensors in place of the plain parameters of units while these run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from zero.fsdp.unit import Unit
from zero.oss.dtensor_checks import watch_steps
from zero.tensor_parallel.shown import Shown, Slot, slots_of

_OUTSIDE = (
    "parameters of {} are read outside of its forward. They are DTensors, which the unit's modules see only while one "
    "of them runs. Put the module that reads them and the unit into one unit, by auto_wrap_policy or as_one_unit."
)


class ShownUnits:
    """Shows the parameters of each unit of an FSDP while the unit runs."""

    def __init__(self, units: Sequence[Unit]) -> None:
        watch_steps()
        self._units = {param: unit for unit in units for param in unit.params}
        innermost = {module: unit for unit in units for module in unit.module.modules()}
        slots: dict[Unit, list[Slot]] = {}
        holders: dict[Unit, set[nn.Module]] = {}
        for module, unit in innermost.items():
            if own := slots_of(module):
                slots.setdefault(unit, []).extend(own)
                holders.setdefault(unit, {unit.module}).add(module)
        self._shown = {unit: Shown(own, self._refuse_sharded) for unit, own in slots.items()}
        self._hooks = [hook for unit, one in self._shown.items() for hook in one.watch(holders[unit])]

    def _refuse_sharded(self, params: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError for a tied parameter of a unit around this one that does not run."""
        for param in params:
            unit = self._units.get(param)
            if unit is not None and not unit.readable:
                raise RuntimeError(_OUTSIDE.format(unit.title))

    def refuse_read(self, unit: Unit) -> None:
        """Raises RuntimeError for a unit that another one reads, if its parameters are DTensors."""
        if unit in self._shown:
            raise RuntimeError(_OUTSIDE.format(unit.title))

    def hide(self) -> None:
        """Ends what an exception has left shown."""
        for one in self._shown.values():
            one.hide()

    def remove(self) -> None:
        """Removes the hooks."""
        self.hide()
        for hook in self._hooks:
            hook.remove()
