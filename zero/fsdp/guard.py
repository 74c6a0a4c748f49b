"""Notices optimizers that would step sharded parameters wrongly, whoever built them.

At stage 3 the optimizer is the user's own and knows nothing of parts. torch calls hooks before any optimizer's step;
the one here looks whether the parameters of an FSDP are among those about to be stepped, and whether that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero.fsdp.unit import Stage, Unit
from zero.oss.flat import FlatGroup
from zero.oss.partition import NEED_ALL, NEED_WHOLE

_guards: WeakSet[Guard] = WeakSet()
_registered: list[Any] = []


class Guard:
    """Checks every step of any optimizer that holds parameters of these units, as long as it lives.

    The step raises RuntimeError for whole parameters, for gradients left by no_sync, for state of other shapes than the
    parts', and for optimizers that need whole parameters where they are cut.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._places: dict[nn.Parameter, tuple[Unit, FlatGroup, int]] = {
            param: (unit, group, index)
            for unit in units
            for group in unit.groups
            for index, param in enumerate(group.params)
        }
        _guards.add(self)
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before_step))

    def dismiss(self) -> None:
        """Looks at no more steps."""
        _guards.discard(self)

    def check(self, optimizer: Optimizer) -> None:
        units = {self._places[p][0] for group in optimizer.param_groups for p in group["params"] if p in self._places}
        for unit in units:
            if unit.stage is Stage.IDLE and not any(group.summoned for group in unit.groups):
                unit.reshard()  # a forward without a backward, such as an evaluation, may have left it whole
        for param_group in optimizer.param_groups:
            for param in param_group["params"]:
                place = self._places.get(param)
                if place is not None and param.grad is not None:
                    self._check_param(optimizer, param, *place)

    def _check_param(self, optimizer: Optimizer, param: nn.Parameter, unit: Unit, group: FlatGroup, index: int) -> None:
        name, kind = group.names[index], type(optimizer).__name__
        if group.summoned or unit.stage is not Stage.IDLE:
            raise RuntimeError(
                f"{name!r} is whole, not this rank's part, while {kind}.step() is called: backward is not complete, or "
                "this is inside summon_full_params(). Step after backward, outside it."
            )
        if unit.unreduced(param):
            raise RuntimeError(
                f"{name!r} has a gradient that was not reduced: the last backward ran under no_sync(). Run the last "
                "backward before step() outside it."
            )
        cut = group.layout.numels[index] != param.numel() != 0
        if cut and type(optimizer) in NEED_WHOLE | NEED_ALL:
            raise RuntimeError(
                f"{kind} needs each parameter whole, but {name!r} is cut between ranks. Wrap the model with "
                "FSDP(partition='whole')."
            )
        whole_shape, _ = group.whole_shape(index)
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == whole_shape != param.shape:
                raise RuntimeError(
                    f"the state {key!r} of {name!r} has the shape of the whole parameter, {list(whole_shape)}, but "
                    f"this rank steps a part of shape {list(param.shape)}. It was made before wrapping, or loaded "
                    "whole: wrap before the first step, and load state of the same parts."
                )


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for guard in list(_guards):
        guard.check(optimizer)
