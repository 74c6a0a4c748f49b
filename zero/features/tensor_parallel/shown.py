"""Shows DTensors in place of the plain parameters while modules run, in forward and where checkpoints recompute it.

Each is made when a module begins that holds it, by an operation that autograd goes back through: the gradient arrives
at the plain parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero._torch import params_of
from zero.features.tensor_parallel import table
from zero.fsdp.events import ModelEvents
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit


class Slot:
    """One name of a module, and the plain parameter that the module has there."""

    def __init__(self, holder: nn.Module, name: str, param: nn.Parameter) -> None:
        self.param = param
        self._own, self._name, self._users = params_of(holder), name, 0
        self._before: Any = None
        self.dtensor: Any = None

    def show(self, dtensor: Any = None) -> None:
        """dtensor: by default a new one."""
        self._users += 1
        if self._users == 1:
            self._before = self._own[self._name]  # the plain parameter, or what summon_full_params() shows
            self._own[self._name] = self.dtensor = table.shown(self.param) if dtensor is None else dtensor

    def hide(self) -> None:
        self._users -= 1
        if not self._users:
            if self._own.get(self._name) is self.dtensor:  # else the user has replaced it, which is refused later
                self._own[self._name] = self._before
            self._before = self.dtensor = None


class Shown:
    """Slots that are shown while any of some modules runs. model: that of the units, if they are units' slots."""

    def __init__(self, slots: Sequence[Slot], model: Model | None = None) -> None:
        self._slots, self._index = slots, None if model is None else model.index
        self._shown: list[Slot] = []
        self._running = 0

    def watch(self, modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
        """Registers hooks on the modules."""
        for module in modules:
            yield module.register_forward_pre_hook(self._begin)
            yield module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _refuse()  # what it raises is not traced
        self._running += 1
        if self._running == 1:
            self._refuse_sharded()
            self._shown = [*self._slots]
            for slot in self._shown:
                slot.show()

    def _refuse_sharded(self) -> None:
        """Raises RuntimeError for a tied parameter of a unit around this one that does not run."""
        if self._index is None:
            return
        for slot in self._slots:
            if slot.param in self._index and not (unit := self._index.unit_of(slot.param)).readable:
                raise RuntimeError(_OUTSIDE.format(unit.title))

    def _end(self, *_: Any) -> None:
        self._running = max(self._running - 1, 0)  # an error before `_begin` calls this, too
        if not self._running:
            self.hide()

    def hide(self) -> None:
        shown, self._shown, self._running = self._shown, [], 0
        for slot in shown:
            slot.hide()


def _refuse_traced() -> None:
    raise RuntimeError(
        "torch.compile was called with a tensor parallel model that zero shards: DTensors take the place of its "
        "parameters while modules run, which cannot be traced. Train it without torch.compile."
    )


_refuse = torch.compiler.disable(_refuse_traced)


def slots_of(module: nn.Module) -> list[Slot]:
    """Returns the slots of a module without those of modules inside it."""
    own = ((name, param) for name, param in params_of(module).items() if param is not None)
    return [Slot(module, name, param) for name, param in own if table.dtensor_of(param) is not None]


_hooks: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""Of `show_everywhere`."""


def show_everywhere(root: nn.Module) -> None:
    """Has every module show all that is inside it."""
    slots = {module: slots_of(module) for module in root.modules()}
    for module in root.modules():
        inside = [slot for each in module.modules() for slot in slots[each]]
        if inside:
            _hooks[module] = [*Shown(inside).watch([module])]


def hide_everywhere(root: nn.Module) -> None:
    for module in root.modules():
        for hook in _hooks.pop(module, ()):
            hook.remove()


_OUTSIDE = (
    "parameters of {} are read outside of its forward. They are DTensors, which the unit's modules see only while one "
    "of them runs. Put the module that reads them and the unit into one unit, by auto_wrap_policy or as_one_unit."
)


class ShowsUnits(ModelEvents):
    """Shows the parameters of each unit of an FSDP while the unit runs."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        innermost = {module: unit for unit in model.units for module in unit.module.modules()}
        slots: dict[Unit, list[Slot]] = {}
        holders: dict[Unit, set[nn.Module]] = {}
        for module, unit in innermost.items():
            if own := slots_of(module):
                slots.setdefault(unit, []).extend(own)
                holders.setdefault(unit, {unit.module}).add(module)
        self._shown = {unit: Shown(own, model) for unit, own in slots.items()}
        self._hooks = [hook for unit, one in self._shown.items() for hook in one.watch(holders[unit])]
        self._entering: Unit | None = None

    def entering(self, unit: Unit) -> None:
        self._entering = unit

    def unsharding(self, unit: Unit) -> None:
        if unit in self._shown and unit is not self._entering and not self.model.backward.active:
            raise RuntimeError(_OUTSIDE.format(unit.title))

    def abandoned(self) -> None:
        for one in self._shown.values():
            one.hide()

    def dismissed(self, *, unwrapped: bool) -> None:
        self.abandoned()
        for hook in self._hooks:
            hook.remove()
