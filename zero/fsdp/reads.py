"""Units that read parameters of other units, such as an embedding's weight that the output layer uses.

No hook is called for such a read, so every call of torch is examined during some forwards (schedule.py). From then on
the other unit is unsharded with the one that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from zero._torch import leaves
from zero.fsdp.unit import Index, Unit

# The getters of attributes that differ between shard and full parameter. dtype and device, for example, do not.
_GETTERS_THAT_READ = {
    attribute.__get__
    for attribute in (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.data, Tensor.shape)
    if hasattr(attribute, "__get__")
}

_CALLS_THAT_DO_NOT = {"__set__", "register_hook", "requires_grad_", "is_floating_point", "is_complex"}


class ForeignReads(TorchFunctionMode):
    """While active, finds the unit of each parameter that is read while no running forward unshards it.

    A unit that stays unsharded from forward to backward is reported, too: in another forward it may be sharded.

    index: where parameters lie. found: called with the unit.
    """

    def __init__(self, index: Index, found: Callable[[Unit], object]) -> None:
        super().__init__()
        self._index, self._found = index, found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for given in (*args, *kwargs.values()) if _reads(func) else ():
            for value in leaves(given) if isinstance(given, (tuple, list, dict)) else (given,):
                if isinstance(value, Tensor) and value in self._index:
                    unit = self._index.unit_of(value)  # type: ignore[arg-type]
                    if not (unit.readable and (unit.users or unit.summoned)):
                        self._found(unit)
        return func(*args, **kwargs)

    def __exit__(self, *raised: object) -> None:
        # Every transfer that was launched meanwhile keeps the mode, as a part of torch's state of the thread.
        del self._index, self._found
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


def _reads(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _GETTERS_THAT_READ if name == "__get__" else name not in _CALLS_THAT_DO_NOT
