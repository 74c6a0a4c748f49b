"""ShardedDDP(overlap_param_gather=True), and offload with overlap=True at stages 1 and 2: all-gathers of parameters
that `step` has left in flight, until the next forward reads the parameters.

Until then the parameters are NaN. In the forward of the wrapper, each operator that takes one waits for its shard group
first. Other forwards, state dicts and listings of parameters wait for all gathers first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zero._torch import is_compiled, leaves
from zero.oss.optimizer import OSS
from zero.sdp.sharded_ddp import Reading, readings
from zero.shards.shard_group import ShardGroup


class PendingGathers(Reading):
    """The gathers in flight of all optimizers of one module.

    While gathers are in flight, all modules that own parameters have hooks; otherwise they have none.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[OSS]) -> None:
        self._module, self._optimizers = module, optimizers
        self._guards: list[RemovableHandle] = []
        for optimizer in optimizers:
            optimizer.stepper.leaves_in_flight = True
            optimizer.register_step_post_hook(lambda *_: self._guard())

    def before_forward(self) -> None:
        """Waits for all gathers if the forward is compiled: it would be compiled again for each set of gathers."""
        if torch.compiler.is_compiling():
            _wait_uncompiled(self)

    def outside(self) -> None:
        """Waits for all gathers."""
        self._unguard()
        _finish_all(self._optimizers)

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Returns a context for a forward that waits for each shard group when an operator first reads one of its
        parameters, and at the end for all others.

        It waits for all at once if a TorchFunctionMode would do harm: without gradients torch has faster kernels, which
        it does not use under a mode, and a compiled module would be compiled again.
        """
        if not self._guards or not torch.is_grad_enabled() or any(map(is_compiled, self._module.modules())):
            self.outside()
            yield
            return
        self._unguard()
        try:
            with _FinishAsRead(self._optimizers):
                yield
        finally:
            self.outside()

    def _guard(self) -> None:
        """Registers hooks that wait, on every module that owns parameters. Called after each step."""
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


def _wait(reading: Reading) -> None:
    reading.outside()


_wait_uncompiled: Callable[[Reading], None] = torch.compiler.disable(_wait, reason="parameters are waited for")


class _Guard:
    """A hook that waits for all gathers before its module runs, is saved or loaded. A copy of it does nothing."""

    def __init__(self, optimizers: Sequence[OSS] = ()) -> None:
        self._optimizers = optimizers

    def __call__(self, *_: object) -> None:
        _finish_all(self._optimizers)

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        if any(group.gathering for optimizer in self._optimizers for group in optimizer.shards.shard_groups):
            raise RuntimeError(
                "the module was copied or pickled while its parameters were gathered (overlap_param_gather=True, or "
                "offload with overlap=True). Copy or pickle the .module of its ShardedDDP or DistributedDataParallel: "
                "reading that attribute waits for the parameters."
            )
        return _Guard, ()


def _finish_all(optimizers: Sequence[OSS]) -> None:
    for optimizer in optimizers:
        optimizer.stepper.finish_gathers()


class _FinishAsRead(TorchFunctionMode):
    """Finishes the gather of a parameter's shard group before any operator that takes the parameter."""

    def __init__(self, optimizers: Sequence[OSS]) -> None:
        super().__init__()
        self._pending: dict[Tensor, tuple[OSS, ShardGroup]] = {
            param: (optimizer, group)
            for optimizer in optimizers
            for group in optimizer.shards.shard_groups
            if group.gathering
            for param in group.params
        }

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in leaves((args, kwargs)) if self._pending else ():
            if isinstance(value, Tensor) and value in self._pending:
                optimizer, group = self._pending[value]
                optimizer.stepper.finish_gathers(group)
                for param in group.params:
                    self._pending.pop(param)
        return function(*args, **kwargs)


readings["overlap_param_gather"] = PendingGathers
