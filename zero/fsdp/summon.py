"""summon_full_params() of any module: an FSDP, a module that contains FSDPs, or a module inside an FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import ReferenceType, ref

from torch import nn

from zero.checks.guard import Guard, moved_problem
from zero.fsdp import full_params
from zero.fsdp.precision import CastBuffer
from zero.fsdp.unit import Unit
from zero.shards.placement import Placement

_alive: list[ReferenceType[Summons]] = []
"""One for each FSDP that exists, in the order of their construction, which is the same on all ranks."""


class Summons:
    """Unshards units of one FSDP for the user, as long as the FSDP exists or until `dismiss`."""

    def __init__(
        self, units: Sequence[Unit], guard: Guard, placement: Placement, cast_buffers: Sequence[CastBuffer]
    ) -> None:
        self._units, self._guard, self.placement, self.cast_buffers = units, guard, placement, cast_buffers
        _alive[:] = [summons for summons in _alive if summons() is not None]
        _alive.append(ref(self))

    def refuse_moved(self) -> None:
        self._guard.refuse_moved()

    def dismiss(self) -> None:
        """Removes it from the list of all: another FSDP has taken over the units, or they were unwrapped."""
        _alive[:] = [summons for summons in _alive if summons() is not self]

    def units_of(self, module: nn.Module, *, recurse: bool) -> list[Unit]:
        """Returns the units that hold parameters of the module; without `recurse` only the module's own unit."""
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
    """Returns the units of any FSDP that hold parameters of the module, in the same order on every rank."""
    return [unit for _, units in summons_of(module) for unit in units]


def summons_of(module: nn.Module) -> list[tuple[Summons, list[Unit]]]:
    """Returns each FSDP's Summons with its units that hold parameters of the module, if it has any."""
    pairs = [(summons, summons.units_of(module, recurse=True)) for summons in _existing()]
    return [(summons, units) for summons, units in pairs if units]


@contextmanager
def summon(module: nn.Module, *, wrapped: nn.Module, recurse: bool, **options: bool) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params, which has the same options.

    module: held here so that it exists until the end. wrapped: the module inside it if it is an FSDP, else itself.
    """
    with ExitStack() as stack:
        for summons in _existing():
            units = summons.units_of(wrapped, recurse=recurse)
            if units:
                stack.enter_context(summons.summoned(units, **options))
        yield


def _existing() -> list[Summons]:
    return [summons for reference in _alive if (summons := reference()) is not None]
