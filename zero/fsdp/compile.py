"""torch.compile: hooks that are not traced, models compiled as a whole or in pieces, and what is refused.

torch.compile accepts units, the module or the FSDP. The code that unshards and reshards units is never traced, so
graphs break where units begin and end, and only units can be compiled with fullgraph=True. If the whole module is
compiled, its first forward in training and its first in evaluation run uncompiled, to find which modules read
parameters of other units. A unit that is compiled by itself must not read any. On GPUs CUDA graphs are refused:
mode="reduce-overhead", "max-autotune" and triton.cudagraphs of torch.compile. zero.graphed records whole steps.

torch.compile examines the gradient of every parameter that it meets, and refuses a gradient of another shape, dtype or
device than the parameter. `param.grad` is the shard's gradient even if the parameter is unsharded while it is traced.
So gradients of shards are hidden while torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zero._torch.compiling import (
    call_around_compiling,
    called_by_cuda_graphs,
    compiled_to_cuda_graphs,
    compiled_without_breaks,
    is_compiled,
    uncompiled,
)
from zero._torch.modules import forward_hooks_of
from zero._torch.tensors import as_plain_tensors
from zero.comm.streams import STEP_GRAPH
from zero.fsdp.model import Model, sharded_params
from zero.fsdp.unit import Unit
from zero.shards.sharded_parameter import GRADIENT, begin_tracing

BETWEEN_UNITS = (
    "FSDP gathers and releases parameters between its units, which cannot be traced. Compile the model without "
    "fullgraph=True, or each of its units by itself, by unit.compile(fullgraph=True)"
)

RECORDING = ("cuda",)
"""The device types whose work can be recorded as a CUDA graph."""

_MOVING = (
    "which go on reading parameters where they were recorded. FSDP frees full parameters and gathers them into other "
    "memory each time (resize_)"
)

_AS_GRAPHS = (
    f"was compiled to run as CUDA graphs, {_MOVING}. Call torch.compile without mode='reduce-overhead' or "
    "'max-autotune' ('max-autotune-no-cudagraphs' can be), and without triton.cudagraphs in its options or in "
    "torch._inductor.config."
)


class Compiling:
    """Runs the forward of one model. Once a model that is compiled as a whole has run uncompiled, the hooks inside its
    units are removed, which would break graphs.

    Raises RuntimeError for a use of torch.compile that FSDP cannot run, in the first forward in training and the first
    in evaluation, and while CUDA graphs are recorded.
    """

    def __init__(self, model: Model) -> None:
        self._units, self._root, self._model = model.units, model.units[0], model
        # Whether the running forward runs uncompiled although modules are compiled.
        self._uncompiled = False
        self._enters_by_units = False
        # Hooks that are not hidden.
        self._direct: set[Callable[..., Any]] = set()
        # Whether full parameters that are freed lie where CUDA graphs are recorded.
        self._records = any(group.frees and group.full.device.type in RECORDING for group in model.index.groups)
        _watch()
        _all.add(self)

    def hook(self, unit: Unit, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """Hides hooks from tracing: torch.compile would make different code of the module for each unit."""
        if unit is not self._root and module is not unit.module:
            # It stays as it is until something is compiled: that takes less of each forward.
            self._direct.add(function)
            return function
        hidden: Callable[..., Any] = _hidden(function)
        if module is unit.module:
            return hidden

        def unless_traced(*args: Any) -> Any:
            if torch.compiler.is_compiling() and unit.running and unit.entry_module is None:
                return None
            return hidden(*args)

        return unless_traced

    def tracing_begins(self) -> None:
        """Removes or hides hooks inside units: modules may have been compiled since the first forwards."""
        for group in (group for unit in self._units for group in unit.groups):
            begin_tracing(group.params)
            group.data_was_read = True
        if not self._root.exists:
            return
        self.search_begins()
        for module in self._root.module.modules() if self._direct else ():
            for hooks in forward_hooks_of(module):
                for number, function in hooks.items():
                    if function in self._direct:
                        hooks[number] = _hidden(function)
        self._direct.clear()

    def search_begins(self) -> None:
        """Compiled modules lose the hooks of modules inside, which are called through them alone."""
        compiled = [] if self._uncompiled else _compiled_in(self._root.module)
        self._remove_inner_hooks(inner for module in compiled for inner in module.modules())

    def _remove_inner_hooks(self, modules: Iterable[nn.Module]) -> None:
        """Removes the hooks from those of `modules` that are inside units: units then call them.

        Modules of the root that are in no other unit keep their hooks, unless the root is the only unit.
        """
        units = self._units
        inner = {module for unit in units[1:] or units if unit.exists for module in unit.module.modules()}
        self._model.remove_hooks(inner.intersection(modules) - {unit.module for unit in units if unit.exists})

    def runner(self, module: nn.Module, *, traced: bool) -> Callable[..., Any]:
        """Called before a forward. Returns what runs it: the module, or, in the first forward of one that is compiled
        as a whole, the module uncompiled. traced: whether the code that calls it is."""
        _watch()
        if self._records and torch.cuda.is_current_stream_capturing() and not STEP_GRAPH.recorded:
            raise RuntimeError(
                f"FSDP ran forward while torch.cuda.graph or make_graphed_callables records CUDA graphs, {_MOVING}, "
                "and a replay would gather nothing. Record the whole step, by zero.graphed(step, model, optimizer)."
            )
        model = self._model
        searches = module.training not in model.modes and model.installed and not self._root.summoned
        if searches:
            units = {unit.module for unit in self._units[1:] if unit.exists}
            try:
                refuse_compiled(module, units, records=self._records)
            except ValueError as error:
                raise RuntimeError(str(error)) from None
        if not (traced or is_compiled(module)):
            return module
        if searches and {*_compiled_in(module)} <= {module, uncompiled(module)}:
            return _hidden(partial(self._run_uncompiled, module))  # type: ignore[no-any-return]
        if not self._enters_by_units:
            self._enters_by_units = True
            self._remove_inner_hooks(module.modules())
        return module

    def _run_uncompiled(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._uncompiled = True
        try:
            with torch.compiler.set_stance("force_eager"):
                return module(*args, **kwargs)
        finally:
            self._uncompiled = False


def _hidden(function: Callable[..., Any]) -> Any:
    """Returns the function, which torch.compile does not trace. Of a method torch would make a circle of objects."""
    return torch.compiler.disable(partial(function), reason=BETWEEN_UNITS)


_all: WeakSet[Compiling] = WeakSet()

_hidden_gradients: list[tuple[nn.Parameter, Tensor]] = []


def _watch() -> None:
    """Has torch.compile hide gradients. Call it again after torch.compiler.reset()."""
    call_around_compiling(_hide, _show)


def _hide(_: object) -> None:
    """Hides the gradients of shards that torch.compile would refuse, and hooks, before it traces anything."""
    for compiling in _all:
        compiling.tracing_begins()
    with as_plain_tensors():  # not as reads in the forward that may be running
        for param in sharded_params():
            gradient = param.grad
            # One as large as the parameter, too, which says that it is sharded: torch would look for its operators.
            if gradient is not None and (type(gradient) is not Tensor or _kind(gradient) != _kind(param)):
                _hidden_gradients.append((param, gradient))
                GRADIENT.__set__(param, None)


def _show(_: object) -> None:
    with as_plain_tensors():
        while _hidden_gradients:
            param, gradient = _hidden_gradients.pop()
            data = param.data
            param.data = gradient  # torch takes only a gradient of the shape, dtype and device of the data
            GRADIENT.__set__(param, gradient)
            param.data = data


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def refuse_compiled(root: nn.Module, units: Collection[nn.Module], *, records: bool) -> None:
    """Raises ValueError if torch.compile was called with modules or options that FSDP cannot run.

    units: the modules of all units below the root. records: whether CUDA graphs could read parameters that are freed.
    """
    if records and called_by_cuda_graphs():
        raise ValueError(f"the code that calls the FSDP {_AS_GRAPHS}")
    for name, module in root.named_modules():
        if not is_compiled(module):
            continue
        title = f"{type(uncompiled(module)).__name__} {name!r}"
        inside = {*module.modules()} - {module, uncompiled(module)}
        if compiled_without_breaks(module) and not inside.isdisjoint(units):
            raise ValueError(f"{title} was compiled with fullgraph=True, and units are inside it. {BETWEEN_UNITS}.")
        if records and compiled_to_cuda_graphs(module):
            raise ValueError(f"{title} {_AS_GRAPHS}")


def _compiled_in(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if is_compiled(module)]
