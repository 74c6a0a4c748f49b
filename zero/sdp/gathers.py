"""Parameters that a step left on their way, waited for where the next forward reads them.

Between step and forward they are NaN. In ShardedDDP's forward each operator that is given one waits for its shard group
first. Whoever runs, saves, loads or lists the module's parameters otherwise waits for all of them before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zero._torch import is_compiled
from zero.oss.optimizer import OSS
from zero.oss.shard_group import ShardGroup


class PendingGathers:
    """Those of all the optimizers of one module.

    While any are in flight, the modules that own parameters have hooks; at rest nothing is on them.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[OSS]) -> None:
        self._module, self._optimizers = module, optimizers
        self._guards: list[RemovableHandle] = []
        for optimizer in optimizers:
            optimizer.leave_gathers()
            optimizer.register_step_post_hook(lambda *_: self._guard())

    def finish(self) -> None:
        """Waits for all."""
        self._unguard()
        finish_all(self._optimizers)

    @contextmanager
    def finished_as_read(self) -> Iterator[None]:
        """For a forward: waits for each shard group when one of its parameters is read, and at the end for the rest.

        It waits for all at once where a mode must not be around: without gradients torch has faster kernels, which it
        does not use under one, and a compiled module would be compiled anew.
        """
        if not self._guards or not torch.is_grad_enabled() or any(map(is_compiled, self._module.modules())):
            self.finish()
            yield
            return
        self._unguard()
        try:
            with _FinishAsRead(self._optimizers):
                yield
        finally:
            self.finish()

    def _guard(self) -> None:
        """After a step, on every module that owns parameters."""
        self._unguard()
        guard = _Guard(self._optimizers)
        for module in self._module.modules():
            if module is self._module or next(module.parameters(recurse=False), None) is not None:
                self._guards += [
                    module.register_forward_pre_hook(guard),
                    module.register_state_dict_pre_hook(guard),
                    module.register_load_state_dict_pre_hook(guard),
                ]

    def _unguard(self) -> None:
        while self._guards:
            self._guards.pop().remove()


class _Guard:
    """A hook that waits before the module that it is on is run, saved or loaded. A copy of it does nothing."""

    def __init__(self, optimizers: Sequence[OSS] = ()) -> None:
        self._optimizers = optimizers

    def __call__(self, *_: object) -> None:
        finish_all(self._optimizers)

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        if any(flat.gathering for optimizer in self._optimizers for flat in optimizer.shard_groups):
            raise RuntimeError(
                "the module was copied or pickled while its parameters were on their way (overlap_param_gather=True), "
                "and past ShardedDDP. Copy or pickle the wrapper's .module, which waits for them."
            )
        return _Guard, ()


def finish_all(optimizers: Sequence[OSS]) -> None:
    for optimizer in optimizers:
        optimizer.finish_gathers()


class _FinishAsRead(TorchFunctionMode):
    """Finishes the gather of a parameter's shard group before any operator that is given the parameter."""

    def __init__(self, optimizers: Sequence[OSS]) -> None:
        super().__init__()
        self._missing: dict[Tensor, tuple[OSS, ShardGroup]] = {
            param: (optimizer, flat)
            for optimizer in optimizers
            for flat in optimizer.shard_groups
            if flat.gathering
            for param in flat.params
        }

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._missing:
            self._finish_for(args)
            self._finish_for(kwargs)
        return function(*args, **kwargs)

    def _finish_for(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value in self._missing:
                optimizer, flat = self._missing[value]
                optimizer.finish_gathers([flat])
                for param in flat.params:
                    self._missing.pop(param)
        elif isinstance(value, Mapping):
            self._finish_for([*value.values()])
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._finish_for(item)
