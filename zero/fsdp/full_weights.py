"""Full weights unit by unit: no rank holds more than one unit beside what it is to get.

A rank that is to get nothing sends its shards and holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch import state_dict_hooks_of, wraps_others
from zero.comm import Comm
from zero.fsdp import full_params
from zero.fsdp.precision import Uncast
from zero.fsdp.state_dict_guard import Refusal
from zero.fsdp.summon import summons_of
from zero.fsdp.unit import Unit
from zero.oss.placement import Placement
from zero.sdp.wrapper import Wrapper


@dataclass(frozen=True)
class Recipient:
    """to: the rank that gets the weights, None for all. device: where, None for where they are computed with."""

    to: int | None
    device: torch.device | str | None

    def is_here(self, placement: Placement) -> bool:
        return self.to is None or (self._here(placement) and placement.comm.rank == self._owner(placement))

    def gather(self, unit: Unit, placement: Placement) -> dict[Tensor, Tensor]:
        """Collective. Copies of the unit's full parameters, where they are to be."""
        if unit.summoned:
            return {param: self.copy(param) for param in unit.params} if self.is_here(placement) else {}
        if self.to is not None and not self._here(placement):
            return {}
        unit.reshard()  # what a forward without backward may have left unsharded
        found: dict[Tensor, Tensor] = {}
        for group in unit.groups:
            group.summon(to=None if self.to is None else self._owner(placement))
            try:
                if self.is_here(placement):
                    found.update({param: self.copy(param) for param in group.params})
            finally:
                group.dismiss(keep=False)
        return found

    def copy(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """With storage of its own."""
        if wraps_others(value):
            return value.detach().clone().to(self.device)
        return value.detach().to(self.device or value.device, dtype or value.dtype, copy=True)

    def moved(self, copies: dict[str, Any]) -> dict[str, Any]:
        """The same copies where they are to be; tied ones stay one."""
        there: dict[Any, Tensor] = {}
        for value in copies.values():
            if isinstance(value, Tensor):
                there.setdefault(value, value.to(self.device or value.device))
        return {name: there[value] if isinstance(value, Tensor) else value for name, value in copies.items()}

    def problem(self, placement: Placement) -> str | None:
        """What is wrong with `to`, in words for the user."""
        ranks = placement.ranks
        if self.to is None or (type(self.to) is int and 0 <= self.to < ranks):
            return None
        return f"to={self.to!r} is no rank of the group of {ranks}: choose 0 to {ranks - 1}, or None for all."

    def _here(self, placement: Placement) -> bool:
        """Whether the replica of this rank holds the recipient."""
        return self.to is not None and placement.has(self.to)

    def _owner(self, placement: Placement) -> int:
        return placement.owner(self.to or 0)


def full_weights(module: nn.Module, comm: Comm, recipient: Recipient) -> dict[str, Any]:
    """Collective where parameters of the module are sharded. See zero.full_state_dict.

    comm: the ranks that `to` counts where nothing is sharded.
    """
    held = summons_of(module)
    placements = [one.placement for one, _ in held]
    wanted = all(map(recipient.is_here, placements or [Placement(comm)]))
    for placement in placements or [Placement(comm)]:
        problem = recipient.problem(placement)
        if problem is not None:
            raise ValueError(problem)
    for one, units in held:
        one.refuse_moved()
        _refuse_what_is_elsewhere(units, wanted=wanted)
    found = _named(module) if held else None
    if found is None:
        if not held and not wanted:
            return {}
        full = full_params.state_dict(module, [unit for _, units in held for unit in units])
        return recipient.moved(full) if wanted else {}
    copies: dict[Tensor, Tensor] = {}
    for one, units in held:
        for unit in units:
            copies |= recipient.gather(unit, one.placement)
        if wanted:
            copies |= {cast.tensor: recipient.copy(cast.tensor, cast.dtype) for cast in one.cast_buffers}
    if not wanted:
        return {}
    for value in found.values():
        if isinstance(value, Tensor) and value not in copies:
            copies[value] = recipient.copy(value)
    return {name: copies[value] if isinstance(value, Tensor) else value for name, value in found.items()}


def _refuse_what_is_elsewhere(units: Sequence[Unit], *, wanted: bool) -> None:
    """Raises RuntimeError within forward and backward, and where only another rank has what was summoned."""
    full_params.refuse_busy([unit for unit in units if not unit.summoned], "full_state_dict()")
    if wanted:
        full_params.refuse_elsewhere(units)


def _named(module: nn.Module) -> dict[str, Any] | None:
    """Parameters and buffers by the names of state_dict(). None where modules make others of them, or have hooks of the
    user's, which must see full parameters, and where an FSDP inside gives full ones."""
    for one in module.modules():
        if isinstance(one, Wrapper) or not all(isinstance(h, (Refusal, Uncast)) for h in state_dict_hooks_of(one)):
            return None
    try:
        found: dict[str, Any] = module.state_dict(keep_vars=True)
    except Exception:  # of a module that cannot do with shards
        return None
    own = {*module.parameters(), *module.buffers()}
    return None if any(isinstance(value, Tensor) and value not in own for value in found.values()) else found
