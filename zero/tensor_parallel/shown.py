"""Modules that hold plain parameters show DTensors: while they run, in forward and where checkpoints recompute it, and
in their state_dict(). DTensors and whole tensors load.

Each is made when a module begins that holds it, by an operation that autograd goes back through: the gradient arrives
at the plain parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import OwnHook, params_of
from zero._torch.tensors import with_local
from zero.tensor_parallel import parts, table


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
    """Slots that are shown while any of some modules runs. check: called with their plain parameters before."""

    def __init__(
        self, slots: Sequence[Slot], check: Callable[[Iterable[nn.Parameter]], object] = lambda params: None
    ) -> None:
        self._slots, self._check = slots, check
        self._shown: list[Slot] = []
        self._running = 0

    def watch(self, modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
        """Registers hooks on the modules."""

        def refuse() -> None:
            raise RuntimeError(
                "torch.compile was called with a tensor parallel model that zero shards: DTensors take the place of "
                "its parameters while modules run, which cannot be traced. Train it without torch.compile."
            )

        self._refuse = torch.compiler.disable(refuse)  # what it raises is not traced
        for module in modules:
            yield module.register_forward_pre_hook(self._begin)
            yield module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self._refuse()
        self._running += 1
        if self._running == 1:
            self._check(slot.param for slot in self._slots)
            self._shown = [*self._slots]
            for slot in self._shown:
                slot.show()

    def _end(self, *_: Any) -> None:
        self._running = max(self._running - 1, 0)  # an error before `_begin` calls this, too
        if not self._running:
            self.hide()

    def hide(self) -> None:
        shown, self._shown, self._running = self._shown, [], 0
        for slot in shown:
            slot.hide()


def slots_of(module: nn.Module) -> list[Slot]:
    """Returns the slots of a module without those of modules inside it."""
    own = ((name, param) for name, param in params_of(module).items() if param is not None)
    return [Slot(module, name, param) for name, param in own if table.dtensor_of(param) is not None]


# On modules that hold plain parameters, of their state_dict; and of `show_everywhere`.
_of_states: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
_of_shown: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


class _AsDTensors(OwnHook):
    """Puts DTensors into a module's state_dict(), except for keep_vars=True."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, param in params_of(module).items():
            saved = state_dict.get(prefix + name)
            dtensor = None if param is None else table.dtensor_of(param)
            if dtensor is not None and isinstance(saved, Tensor) and saved is not param and not table.is_dtensor(saved):
                state_dict[prefix + name] = table.like(dtensor, saved)


class _Cut(OwnHook):
    """Cuts whole tensors and DTensors to this rank's parts."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        errors = more[-1]
        for name, param in params_of(module).items():
            value = state_dict.get(prefix + name)
            dtensor = None if param is None else table.dtensor_of(param)
            if dtensor is not None and param is not None and isinstance(value, Tensor):
                try:
                    part = parts.cut(param, value)
                    state_dict[prefix + name] = table.like(dtensor, part) if table.is_dtensor(param) else part
                except ValueError as error:
                    errors.append(f"size mismatch for {prefix + name}, which is tensor parallel: it {error}.")
                    state_dict[prefix + name] = param.detach()


def show_everywhere(root: nn.Module) -> None:
    """Has every module show all that is inside it."""
    slots = {module: slots_of(module) for module in root.modules()}
    for module in root.modules():
        if inside := [slot for each in module.modules() for slot in slots[each]]:
            _of_shown[module] = [*Shown(inside).watch([module])]


def put_into(module: nn.Module, without: Collection[nn.Parameter] = ()) -> None:
    """Replaces DTensors of a module by plain parameters. Ranks have agreed that they can. without: those left out."""
    replaced, left_out = set[Any](), {*without}
    for holder in module.modules():
        own = params_of(holder)
        found = {name: one for name, one in own.items() if one not in left_out and table.is_dtensor(one)}
        own.update((name, parts.of(param)) for name, param in found.items())
        replaced |= {*found.values()}
        if found and holder not in _of_states:
            _of_states[holder] = [
                holder.register_state_dict_post_hook(_AsDTensors()),
                holder.register_load_state_dict_pre_hook(_Cut()),
            ]
    for param in replaced:
        param.grad = None
        with_local(param, torch.empty(0, dtype=param.dtype, device=param.device))


def take_out_of(module: nn.Module) -> None:
    """Puts the user's own parameters back. The plain ones have full values."""
    own: dict[nn.Parameter, Any] = {}
    for holder in module.modules():
        for name, param in params_of(holder).items():
            dtensor: Any = None if param is None else table.dtensor_of(param)
            if dtensor is not None and param is not None:
                params_of(holder)[name] = own[param] = dtensor
        for hook in (*_of_states.pop(holder, ()), *_of_shown.pop(holder, ())):
            hook.remove()
    for param, dtensor in own.items():
        with_local(dtensor, param.detach())
        dtensor.requires_grad_(param.requires_grad)
        table.forget(param)
