"""The forward of a model, which may be compiled as a whole or contain compiled modules.

The code that unshards and reshards units is never traced. A model that is compiled as a whole is therefore compiled
unit by unit, in graphs that break where a unit begins and ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero._torch import is_compiled
from zero.features.compile.compiled import BETWEEN_UNITS, compiled_in_pieces, compiling_problem, refuse_capture
from zero.features.compile.tracing import Gradients, watch
from zero.fsdp.backward import Backward
from zero.fsdp.schedule import Schedule
from zero.fsdp.unit import Unit
from zero.sdp.buffers import BufferSync


class Forward:
    """Synchronises the buffers of the module, and runs it.

    units: the module's, the root first.
    gradients: the gradients that torch.compile must not see while it traces the module.
    warning: shown by the first forward, because an FSDP inside another one has none.

    Raises RuntimeError for a use of torch.compile that FSDP cannot run, in the first forward in training and the first
    in evaluation, and while CUDA graphs are recorded.

    A model that is compiled as a whole runs its first forward in training and its first in evaluation uncompiled: in
    these the schedule finds reads of other units' parameters, which it cannot see in traced code. It then removes the
    hooks inside the units, which would break graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        backward: Backward,
        gradients: Gradients,
        buffers: BufferSync | None,
        warning: str | None,
    ) -> None:
        self._module, self._schedule, self._backward = module, schedule, backward
        self._gradients, self._buffers, self._warning = gradients, buffers, warning
        self._enters_by_units = False
        self._inner = {unit.module for unit in units[1:]}
        self._freed = {group.full.device for unit in units for group in unit.groups if group.frees}
        watch()
        self._begin: Callable[[bool], bool] = torch.compiler.disable(self._before, reason=BETWEEN_UNITS)
        self._end: Callable[[], None] = torch.compiler.disable(self._after, reason=BETWEEN_UNITS)
        self._run_uncompiled: Callable[..., Any] = torch.compiler.disable(self._uncompiled, reason=BETWEEN_UNITS)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Only this function of the class is traced, if the model is compiled from outside."""
        if self._begin(torch.compiler.is_compiling()):
            output = self._run_uncompiled(*args, **kwargs)
        else:
            output = self._module(*args, **kwargs)
        self._end()
        return output

    def _before(self, traced: bool) -> bool:
        """Prepares a forward. Returns whether the module is to run uncompiled although it is compiled."""
        watch()
        if self._warning is not None:
            warning, self._warning = self._warning, None
            warnings.warn(warning, stacklevel=7)  # at the caller of the model
        refuse_capture(self._freed)
        self._schedule.before_forward()
        if self._schedule.searches_next:
            problem = compiling_problem(self._module, self._inner, self._freed)
            if problem is not None:
                raise RuntimeError(problem)
        if self._buffers is not None:
            self._buffers.before_forward()
        if not traced and not is_compiled(self._module):
            return False
        if self._schedule.searches_next and not compiled_in_pieces(self._module):
            return True
        if not self._enters_by_units:
            self._enters_by_units = True
            self._schedule.remove_inner_hooks()
        return False

    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        self._schedule.uncompiled = True
        try:
            with torch.compiler.set_stance("force_eager"):
                return self._module(*args, **kwargs)
        finally:
            self._schedule.uncompiled = False

    def _after(self) -> None:
        if self._buffers is not None:
            self._buffers.after_forward(reduced=self._backward.reduces)
