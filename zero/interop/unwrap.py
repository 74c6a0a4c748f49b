"""Restores a module to its form before FSDP wrapped it, with full parameters in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch.utils.hooks import RemovableHandle

from zero._torch import buffers_of
from zero.fsdp.full_params import refuse_busy
from zero.fsdp.precision import CastBuffer
from zero.fsdp.unit import Unit
from zero.interop.unwrapped import UNWRAPPED


def restore_module(units: Sequence[Unit], cast_buffers: Sequence[CastBuffer], hooks: Sequence[RemovableHandle]) -> None:
    """Collective. Unshards the units' parameters for good on every rank, drops gradients, and undoes casts of buffers.

    hooks: those of mixed precision on modules, which are removed. Raises RuntimeError within forward, backward and
    summon_full_params().
    """
    refuse_busy(units, "zero.unwrap()")
    for unit in units:
        unit.reshard()
        for group in unit.groups:
            for param in group.params:
                param.grad = None
            group.summon()  # without dismiss()
    for cast in cast_buffers:
        buffers_of(cast.module)[cast.name] = cast.tensor.to(cast.dtype)
    for hook in hooks:
        hook.remove()


def refuse_forward(*_: Any) -> NoReturn:
    """Raises RuntimeError. Called instead of the checks before a forward, once the module is unwrapped."""
    raise RuntimeError(UNWRAPPED.format("FSDP"))
