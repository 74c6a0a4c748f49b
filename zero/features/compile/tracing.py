"""Hides gradients of shards while torch.compile traces code that computes with full parameters.

torch.compile examines the gradient of every parameter that it meets, and refuses a gradient of another shape, dtype or
device than the parameter. `param.grad` is the shard's gradient even if the parameter is unsharded while it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from torch import Tensor, nn

from zero._torch import call_around_compiling


class Gradients:
    """Hides the gradients of these parameters from torch.compile, as long as this object exists."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        _alive.add(self)

    def hide(self) -> None:
        for param in self._params:
            gradient = param.grad
            if gradient is not None and not _alike(param, gradient):
                self._hidden.append((param, gradient))
                param.grad = None

    def show(self) -> None:
        for param, gradient in self._hidden:
            data = param.data
            param.data = gradient  # torch takes only a gradient of the shape, dtype and device of the data
            param.grad = gradient
            param.data = data
        self._hidden.clear()


_alive: WeakSet[Gradients] = WeakSet()


def watch() -> None:
    """Registers `_hide` and `_show` with torch.compile. Call it again after torch.compiler.reset()."""
    call_around_compiling(_hide, _show)


def _alike(param: nn.Parameter, gradient: Tensor) -> bool:
    return (param.shape, param.dtype, param.device) == (gradient.shape, gradient.dtype, gradient.device)


def _hide(_: object) -> None:
    for gradients in [*_alive]:
        gradients.hide()


def _show(_: object) -> None:
    for gradients in [*_alive]:
        gradients.show()
