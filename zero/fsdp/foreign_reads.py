"""Finds the parameters that a module reads although they belong to another unit, such as an embedding's weight that
the output layer multiplies by. No hook is called for such a read: every call of torch is looked at, in one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero.fsdp.index import Index
from zero.fsdp.unit import Unit

_GETTERS_THAT_READ = {
    attribute.__get__
    for attribute in (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.data, Tensor.shape)
    if hasattr(attribute, "__get__")
}
"""Of attributes. Others, such as dtype and device, are the same for a shard."""

_CALLS_THAT_DO_NOT = {"__set__", "register_hook", "requires_grad_", "is_floating_point", "is_complex"}


class ForeignReads(TorchFunctionMode):
    """While active, calls `found` with the unit of a parameter that is read while nothing that runs keeps it unsharded.

    A unit that stays from forward to backward is unsharded by chance: in another forward it may not be.
    """

    def __init__(self, index: Index, found: Callable[[Unit], None]) -> None:
        super().__init__()
        self._index, self._on_read = index, found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _reads(func):
            for param in _parameters((*args, *(kwargs or {}).values())):
                unit = self._index.unit_of(param) if param in self._index else None
                if unit is not None and not (unit.readable and (unit.depth or unit.running_readers or unit.summoned)):
                    self._on_read(unit)
        return func(*args, **(kwargs or {}))


def _reads(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _GETTERS_THAT_READ if name == "__get__" else name not in _CALLS_THAT_DO_NOT


def _parameters(values: Sequence[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters(value)
