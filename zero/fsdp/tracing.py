"""Gradients of shards, out of sight while torch.compile traces what computes with full parameters.

torch.compile looks at the gradient of every parameter that it meets, and refuses one of another shape, dtype or device
than the parameter's. At rest a gradient is its shard's; the parameter may be unsharded when it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from torch import Tensor, nn

from zero._torch import call_around_compiling


class Gradients:
    """Those of these parameters, from when it is made on and as long as it lives."""

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
            param.data = gradient  # torch takes a gradient only while it is like the data
            param.grad = gradient
            param.data = data
        self._hidden.clear()


_alive: WeakSet[Gradients] = WeakSet()


def watch() -> None:
    """Has torch.compile call what hides gradients. To be called again: torch.compiler.reset() forgets it."""
    call_around_compiling(_hide, _show)


def _alike(param: nn.Parameter, gradient: Tensor) -> bool:
    one = (param.shape, param.dtype, param.device)
    return one == (gradient.shape, gradient.dtype, gradient.device)


def _hide(_: object) -> None:
    for gradients in [*_alive]:
        gradients.hide()


def _show(_: object) -> None:
    for gradients in [*_alive]:
        gradients.show()
