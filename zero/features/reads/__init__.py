"""Units that read parameters of other units, such as an embedding's weight that the output layer uses.

No hook is called for such a read, so every call of torch is examined during the first forward in training and the first
in evaluation. From then on the other unit is unsharded with the one that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from zero._torch import leaves
from zero.fsdp.events import ModelEvents, model_events
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit

_GETTERS_THAT_READ = {
    attribute.__get__
    for attribute in (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.data, Tensor.shape)
    if hasattr(attribute, "__get__")
}
"""The getters of attributes that differ between shard and full parameter. dtype and device, for example, do not."""

_CALLS_THAT_DO_NOT = {"__set__", "register_hook", "requires_grad_", "is_floating_point", "is_complex"}


class Reads(ModelEvents):
    """Which units read parameters of which others."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._reads: dict[Unit, list[Unit]] = {}
        self._read: set[Unit] = set()
        self._search = ExitStack()

    def companions(self, unit: Unit) -> Iterable[Unit]:
        return self._reads.get(unit, ())

    def late(self, unit: Unit) -> bool:
        return unit in self._read

    def mode_begins(self) -> None:
        if not self.model.schedule.traced:
            self._search.enter_context(ForeignReads(self))

    def leaving(self, unit: Unit) -> None:
        if unit is self.model.root:
            self._search.close()

    def abandoned(self) -> None:
        self._search.close()

    def found(self, other: Unit) -> None:
        """Notes that the innermost running unit reads parameters of `other`."""
        if other in self.model.schedule.running:
            return  # its forward is ending, and returns its output
        reader = self.model.schedule.also_unshard(other)
        self._read.add(other)
        if other not in self._reads.setdefault(reader, []):
            self._reads[reader].append(other)


class ForeignReads(TorchFunctionMode):
    """While active, finds the unit of each parameter that is read while no running forward unshards it.

    A unit that stays unsharded from forward to backward is reported, too: in another forward it may be sharded.
    """

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads, self._index = reads, reads.model.index

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for given in (*args, *kwargs.values()) if _reads(func) else ():
            for value in leaves(given) if isinstance(given, (tuple, list, dict)) else (given,):
                if isinstance(value, Tensor) and value in self._index:
                    unit = self._index.unit_of(value)  # type: ignore[arg-type]
                    if not (unit.readable and (unit.users or unit.summoned)):
                        self._reads.found(unit)
        return func(*args, **kwargs)


def _reads(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _GETTERS_THAT_READ if name == "__get__" else name not in _CALLS_THAT_DO_NOT


model_events.append(Reads)
