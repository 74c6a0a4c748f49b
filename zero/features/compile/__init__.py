"""torch.compile: hooks that are not traced, models compiled as a whole or in pieces, and what is refused.

torch.compile accepts units, the module or the FSDP. The code that unshards and reshards units is never traced, so
graphs break where units begin and end, and only units can be compiled with fullgraph=True. If the whole module is
compiled, its first forward in training and its first in evaluation run uncompiled, to find which modules read
parameters of other units. If units are compiled, FSDP does not search for such reads, and no module may read parameters
of another unit. On GPUs CUDA graphs are refused (compiled.py): mode="reduce-overhead", "max-autotune" and
triton.cudagraphs of torch.compile, and torch.cuda.graph.

torch.compile examines the gradient of every parameter that it meets, and refuses a gradient of another shape, dtype or
device than the parameter. `param.grad` is the shard's gradient even if the parameter is unsharded while it is traced.
So gradients of shards are hidden while torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zero._torch import call_around_compiling, is_compiled
from zero.features.compile.compiled import (
    BETWEEN_UNITS,
    compiled_in_pieces,
    compiled_modules,
    compiling_problem,
    refuse_capture,
)
from zero.fsdp.events import ModelEvents, makers
from zero.fsdp.model import Forward, Model
from zero.fsdp.unit import Unit
from zero.shards.arguments import refusals


class Compiling(ModelEvents):
    """Runs the forward of one model.

    Raises RuntimeError for a use of torch.compile that FSDP cannot run, in the first forward in training and the first
    in evaluation, and while CUDA graphs are recorded.

    A model that is compiled as a whole runs its first forward in training and its first in evaluation uncompiled: in
    these other features find what they cannot see in traced code, such as reads of other units' parameters. Then the
    hooks inside the units are removed, which would break graphs.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._uncompiled = False
        """Whether the running forward runs uncompiled although modules are compiled."""
        self._enters_by_units = False
        self._inner = {unit.module for unit in model.units[1:]}
        self._freed = {group.full.device for unit in model.units for group in unit.groups if group.frees}
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients that are hidden from torch.compile."""
        _alive.add(self)
        _watch()

    # ------------------------------------------------------------------------------------------ the hooks of units

    def hook(self, unit: Unit, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """Hides hooks from tracing: torch.compile would make different code of the module for each unit."""
        hidden: Callable[..., Any] = torch.compiler.disable(function, reason=BETWEEN_UNITS)
        if unit is self.model.root and module is not unit.module:
            return _unless_traced_in(unit, hidden)
        return hidden

    def mode_begins(self) -> None:
        """Compiled modules lose the hooks of modules inside, which are called through them alone."""
        compiled = set() if self._uncompiled else compiled_modules(self.model.module)
        self.model.schedule.traced = bool(compiled)
        if compiled:
            self._remove_inner_hooks(compiled)

    def _remove_inner_hooks(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Removes the hooks from modules inside units, or from those of `modules`: units then call them.

        Modules of the root that are in no other unit keep their hooks, unless the root is the only unit.
        """
        units = self.model.units
        inner = {module for unit in units[1:] or units for module in unit.module.modules()}
        chosen = inner if modules is None else inner.intersection(modules)
        self.model.schedule.remove(chosen - {unit.module for unit in units})

    # ------------------------------------------------------------------------------------------ the model's forward

    def forward(self, run: Forward) -> Callable[..., Any]:
        begin: Callable[[Forward, bool], bool] = torch.compiler.disable(self._begin, reason=BETWEEN_UNITS)
        end: Callable[[], None] = torch.compiler.disable(run.end, reason=BETWEEN_UNITS)
        uncompiled: Callable[..., Any] = torch.compiler.disable(self._run_uncompiled, reason=BETWEEN_UNITS)
        module = run.module

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Of all this, only the code of this function is traced if the model is compiled from outside."""
            if begin(run, torch.compiler.is_compiling()):
                output = uncompiled(module, *args, **kwargs)
            else:
                output = module(*args, **kwargs)
            end()
            return output

        return forward

    def _begin(self, run: Forward, traced: bool) -> bool:
        """Begins a forward. Returns whether the module is to run uncompiled although it is compiled."""
        _watch()
        refuse_capture(self._freed)
        if self._searches_next:
            problem = compiling_problem(self.model.module, self._inner, self._freed)
            if problem is not None:
                raise RuntimeError(problem)
        run.begin()
        if not traced and not is_compiled(self.model.module):
            return False
        if self._searches_next and not compiled_in_pieces(self.model.module):
            return True
        if not self._enters_by_units:
            self._enters_by_units = True
            self._remove_inner_hooks()
        return False

    @property
    def _searches_next(self) -> bool:
        due = self.model.module.training not in self.model.schedule.modes
        return due and self.model.schedule.installed and not self.model.root.summoned

    def _run_uncompiled(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._uncompiled = True
        try:
            with torch.compiler.set_stance("force_eager"):
                return module(*args, **kwargs)
        finally:
            self._uncompiled = False

    # ------------------------------------------------------------------------------------------ gradients

    def hide_gradients(self) -> None:
        """Hides the gradients that torch.compile would refuse."""
        for param in self.model.index:
            gradient = param.grad
            if gradient is not None and _kind(gradient) != _kind(param):
                self._hidden.append((param, gradient))
                param.grad = None

    def show_gradients(self) -> None:
        for param, gradient in self._hidden:
            data = param.data
            param.data = gradient  # torch takes only a gradient of the shape, dtype and device of the data
            param.grad = gradient
            param.data = data
        self._hidden.clear()


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _unless_traced_in(unit: Unit, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook, hidden from torch.compile while the unit runs."""

    def unless_traced(*args: Any) -> Any:
        if torch.compiler.is_compiling() and unit.running and unit.entry_module is None:
            return None
        return hook(*args)

    return unless_traced


_alive: WeakSet[Compiling] = WeakSet()


def _watch() -> None:
    """Registers `_hide` and `_show` with torch.compile. Call it again after torch.compiler.reset()."""
    call_around_compiling(_hide, _show)


def _hide(_: object) -> None:
    for one in [*_alive]:
        one.hide_gradients()


def _show(_: object) -> None:
    for one in [*_alive]:
        one.show_gradients()


makers.append(Compiling)
refusals.append(lambda wrapping: compiling_problem(wrapping.module, wrapping.units, wrapping.freed))
