"""A module as it was before FSDP wrapped it, with full parameters in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch.utils.hooks import RemovableHandle

from zero._torch import buffers_of
from zero.fsdp.full_params import refuse_busy
from zero.fsdp.precision import CastBuffer
from zero.fsdp.unit import Unit
from zero.sdp.unwrapped import UNWRAPPED


def restore_module(units: Sequence[Unit], cast_buffers: Sequence[CastBuffer], hooks: Sequence[RemovableHandle]) -> None:
    """Collective. Leaves the units' parameters unsharded on every rank, without gradients, and the buffers uncast.

    hooks: what mixed precision has put on modules. Raises RuntimeError within forward and backward, and inside of
    summon_full_params().
    """
    refuse_busy(units, "zero.unwrap()")
    for unit in units:
        unit.reshard()
        for group in unit.groups:
            for param in group.params:
                param.grad = None
            group.summon()  # for good: nobody dismisses it
    for one in cast_buffers:
        buffers_of(one.module)[one.name] = one.tensor.to(one.dtype)
    for hook in hooks:
        hook.remove()


def refuse_forward(*_: Any) -> NoReturn:
    """In the place of what FSDP does before a forward."""
    raise RuntimeError(UNWRAPPED.format("FSDP"))
