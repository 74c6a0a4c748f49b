"""Weights that were given to the first rank alone, such as what it has read from a file. It loads them into full
parameters in the host's memory, by the module's own load_state_dict(); then they are sent unit by unit: another rank
holds one full unit at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zero.comm import Comm
from zero.fsdp.full_weights import summoned
from zero.fsdp.model import Model, models_of
from zero.fsdp.unit import Unit
from zero.state.from_first import broadcast, from_first, is_first_of


def load_weights(module: nn.Module, comms: Sequence[Comm], load: Callable[[], Any]) -> Any:
    """Collective. Returns what load_state_dict() does.

    load: calls the module's load_state_dict(); is called on the first rank. Raises ValueError on every rank if it
    raises. torch then has loaded what fits, which stays at stages 0 to 2; sharded parameters stay as they were.
    """
    sharded = models_of(module)
    held = {param for _, units in sharded for unit in units for param in unit.params}
    others = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor not in held]
    with ExitStack() as stack:
        for model, units in sharded:
            stack.enter_context(summoned(model, units, rank0_only=True, offload_to_cpu=True))
        try:
            missing, unexpected = from_first(comms, load)
        finally:
            broadcast(comms, others)
        for model, units in sharded:
            for unit in units:
                _send(model, unit, first=is_first_of(comms))
    names = nn.Module().load_state_dict({})
    return names._replace(missing_keys=missing, unexpected_keys=unexpected)


def _send(model: Model, unit: Unit, *, first: bool) -> None:
    """Collective. Gives every rank its shards of a unit whose parameters are summoned on the first rank."""
    params = [param for group in unit.groups for param in group.params]
    loaded = [param.detach() for param in params] if first else []
    unit.dismiss(keep=False)
    with summoned(model, [unit], writeback=True), torch.no_grad():
        for param, value in zip(params, loaded, strict=False):
            param.copy_(value)
        model.placement.broadcast(params)
