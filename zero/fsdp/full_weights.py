"""Gathers full weights unit by unit, so that a rank holds one full unit at most beside the weights it receives.

A rank that receives no weights sends its shards and holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch import state_dict_hooks_of, wraps_others
from zero.comm import Comm
from zero.fsdp import full_params
from zero.fsdp.model import models_of
from zero.fsdp.precision import OwnHook
from zero.fsdp.unit import Unit
from zero.sdp.wrapper import Wrapper
from zero.shards.placement import Placement


@dataclass(frozen=True)
class Recipient:
    """to: the rank that receives full weights, None for all. device: None for the device that computes."""

    to: int | None
    device: torch.device | str | None

    def receives(self, placement: Placement) -> bool:
        """Returns whether this rank receives the weights."""
        return self.to is None or (self._in_this_replica(placement) and placement.comm.rank == self._owner(placement))

    def gather(self, unit: Unit, placement: Placement) -> dict[Tensor, Tensor]:
        """Collective. Returns copies of the unit's full parameters on the recipient, nothing on other ranks."""
        if unit.summoned:
            return {param: self.copy(param) for param in unit.params} if self.receives(placement) else {}
        if self.to is not None and not self._in_this_replica(placement):
            return {}
        unit.reshard()  # a forward without backward may have left it unsharded
        copies: dict[Tensor, Tensor] = {}
        for group in unit.groups:
            group.summon(to=None if self.to is None else self._owner(placement))
            try:
                if self.receives(placement):
                    copies.update({param: self.copy(param) for param in group.params})
            finally:
                group.dismiss(keep=False)
        return copies

    def copy(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a copy on the recipient's device, with storage of its own."""
        if wraps_others(value):
            return value.detach().clone().to(self.device)
        return value.detach().to(self.device or value.device, dtype or value.dtype, copy=True)

    def move(self, copies: dict[str, Any]) -> dict[str, Any]:
        """Returns the copies on the recipient's device. Tied weights stay one tensor."""
        moved: dict[Any, Tensor] = {}
        for value in copies.values():
            if isinstance(value, Tensor):
                moved.setdefault(value, value.to(self.device or value.device))
        return {name: moved[value] if isinstance(value, Tensor) else value for name, value in copies.items()}

    def problem(self, placement: Placement) -> str | None:
        """Returns an error message if `to` is no rank, else None."""
        ranks = placement.ranks
        if self.to is None or (type(self.to) is int and 0 <= self.to < ranks):
            return None
        return f"to={self.to!r} is no rank of the group of {ranks}: choose 0 to {ranks - 1}, or None for all."

    def _in_this_replica(self, placement: Placement) -> bool:
        return self.to is not None and placement.has(self.to)

    def _owner(self, placement: Placement) -> int:
        return placement.owner(self.to or 0)


def full_weights(module: nn.Module, comm: Comm, recipient: Recipient) -> dict[str, Any]:
    """Collective where parameters of the module are sharded. See zero.full_state_dict.

    comm: the ranks among which `to` is one, if nothing is sharded.
    """
    sharded = models_of(module)
    placements = [model.placement for model, _ in sharded]
    receives = all(map(recipient.receives, placements or [Placement(comm)]))
    for placement in placements or [Placement(comm)]:
        problem = recipient.problem(placement)
        if problem is not None:
            raise ValueError(problem)
    for model, units in sharded:
        model.refuse_moved()
        full_params.refuse_busy([unit for unit in units if not unit.summoned], "full_state_dict()")
        if receives:
            full_params.refuse_unreadable(units)
    named = _named(module) if sharded else None
    if named is None:
        if not sharded and not receives:
            return {}
        full = full_params.state_dict(module, [unit for _, units in sharded for unit in units])
        return recipient.move(full) if receives else {}
    copies: dict[Tensor, Tensor] = {}
    for model, units in sharded:
        for unit in units:
            copies |= recipient.gather(unit, model.placement)
        if receives:
            copies |= {cast.tensor: recipient.copy(cast.tensor, cast.dtype) for cast in model.cast_buffers}
    if not receives:
        return {}
    for value in named.values():
        if isinstance(value, Tensor) and value not in copies:
            copies[value] = recipient.copy(value)
    return {name: copies[value] if isinstance(value, Tensor) else value for name, value in named.items()}


def _named(module: nn.Module) -> dict[str, Any] | None:
    """Returns parameters and buffers by the names of state_dict(). Returns None if state_dict() has other tensors, has
    hooks of the user's, which must see full parameters, or is a wrapper's, which has full parameters."""
    for child in module.modules():
        if isinstance(child, Wrapper) or not all(isinstance(h, OwnHook) for h in state_dict_hooks_of(child)):
            return None
    try:
        named: dict[str, Any] = module.state_dict(keep_vars=True)
    except Exception:  # the module's own state_dict() cannot handle shards
        return None
    own = {*module.parameters(), *module.buffers()}
    return None if any(isinstance(value, Tensor) and value not in own for value in named.values()) else named
