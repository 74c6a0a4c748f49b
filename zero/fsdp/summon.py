"""Full parameters of any module at the user's wish: of an FSDP, of what contains some, of what lies inside one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import ReferenceType, ref

from torch import nn

from zero.fsdp import full_params
from zero.fsdp.guard import Guard, moved_problem
from zero.fsdp.precision import CastBuffer
from zero.fsdp.unit import Unit
from zero.oss.placement import Placement

_alive: list[ReferenceType[Summons]] = []
"""Those of every FSDP that lives, in the order in which they were made, which is the same on all ranks."""


class Summons:
    """Unshards units of one FSDP, as long as it lives or until it is dismissed."""

    def __init__(
        self, units: Sequence[Unit], guard: Guard, placement: Placement, cast_buffers: Sequence[CastBuffer]
    ) -> None:
        self._units, self._guard, self.placement, self.cast_buffers = units, guard, placement, cast_buffers
        _alive[:] = [known for known in _alive if known() is not None]
        _alive.append(ref(self))

    def refuse_moved(self) -> None:
        """As Guard.refuse_moved."""
        self._guard.refuse_moved()

    def dismiss(self) -> None:
        """Another FSDP has the units."""
        _alive[:] = [known for known in _alive if known() is not self]

    def units_of(self, module: nn.Module, *, recurse: bool) -> list[Unit]:
        """Those that hold parameters of the module; without `recurse` only the one that is the module's own."""
        if not recurse:
            return [unit for unit in self._units if unit.module is module]
        params = {*module.parameters()}
        return [unit for unit in self._units if not params.isdisjoint(unit.params)]

    @contextmanager
    def summoned(
        self, units: Sequence[Unit], *, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
    ) -> Iterator[None]:
        """Collective. See FSDP.summon_full_params."""
        self._guard.refuse_moved()
        with full_params.summoned(
            units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            yield
            if writeback:
                groups = [group for unit in units for group in unit.groups]
                self.placement.compare("the full parameters of FSDP", [], moved_problem(groups))


def units_of(module: nn.Module) -> list[Unit]:
    """The units of any FSDP that hold parameters of the module, in the same order on every rank."""
    return [unit for _, units in summons_of(module) for unit in units]


def summons_of(module: nn.Module) -> list[tuple[Summons, list[Unit]]]:
    """The same by FSDP."""
    found = [(one, one.units_of(module, recurse=True)) for one in _living()]
    return [(one, units) for one, units in found if units]


@contextmanager
def summon(module: nn.Module, *, wrapped: nn.Module, recurse: bool, **options: bool) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params, whose options these are.

    wrapped: what the module wraps if it is an FSDP, which lives as long as this does; otherwise the module.
    """
    with ExitStack() as stack:
        for one in _living():
            units = one.units_of(wrapped, recurse=recurse)
            if units:
                stack.enter_context(one.summoned(units, **options))
        yield


def _living() -> list[Summons]:
    return [there for known in _alive if (there := known()) is not None]
