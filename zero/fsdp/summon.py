"""summon_full_params() of any module: an FSDP, a module that contains FSDPs, or a module inside an FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from zero.fsdp import full_params
from zero.fsdp.model import Model, models, moved_problem
from zero.fsdp.unit import Unit


@contextmanager
def summon(module: nn.Module, *, wrapped: nn.Module, recurse: bool, **options: bool) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params, which has the same options.

    module: held here so that it exists until the end. wrapped: the module inside it if it is an FSDP, else itself.
    """
    with ExitStack() as stack:
        for model in models():
            units = model.units_of(wrapped, recurse=recurse)
            if units:
                stack.enter_context(_summoned(model, units, **options))
        yield


@contextmanager
def _summoned(model: Model, units: list[Unit], *, writeback: bool, **options: bool) -> Iterator[None]:
    model.refuse_moved()
    with full_params.summoned(units, writeback=writeback, **options):
        yield
        if writeback:
            groups = [group for unit in units for group in unit.groups]
            model.placement.compare("the full parameters of FSDP", [], moved_problem(groups))
