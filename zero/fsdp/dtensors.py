"""Shows DTensors within summon_full_params(), with gradients as DTensors, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from zero.fsdp import full_weights
from zero.fsdp.model import models
from zero.tensor_parallel import table
from zero.tensor_parallel.shown import Slot, slots_of


@contextmanager
def summon(module: nn.Module, *, wrapped: nn.Module, recurse: bool, **options: bool) -> Iterator[None]:
    """Collective. See full_weights.summon. Parameters that are on another device than the mesh (offload_to_cpu), and
    those that only other ranks have full, stay plain."""
    with full_weights.summon(module, wrapped=wrapped, recurse=recurse, **options), ExitStack() as shown:
        units = [unit for model in models() for unit in model.units_of(wrapped, recurse=recurse)]
        full = {param for unit in units if unit.readable for param in unit.params}
        tied: dict[nn.Parameter, Any] = {}
        for slot in [slot for holder in wrapped.modules() for slot in slots_of(holder)]:
            dtensor: Any = table.dtensor_of(slot.param)
            if slot.param in full and slot.param.device.type == dtensor.device_mesh.device_type:
                slot.show(tied.get(slot.param))
                tied[slot.param] = slot.dtensor
                if options.get("with_grads") and slot.param.grad is not None:
                    slot.dtensor.grad = table.like(dtensor, slot.param.grad)
                shown.callback(_hide, slot, with_grads=options.get("with_grads", False))
        yield


def _hide(slot: Slot, *, with_grads: bool) -> None:
    """Takes over what was set. Values and gradients were written on the parameter's memory."""
    slot.param.requires_grad_(slot.dtensor.requires_grad)
    if with_grads and slot.dtensor.grad is None:
        slot.param.grad = None
    slot.hide()
