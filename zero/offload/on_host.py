"""Where shards lie in the memory of the CPU, or in mapped files, and the optimizer steps them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import has_values
from zero.measure.kinds import ELEMENTWISE
from zero.offload import norms
from zero.offload.pieces import GroupStep, Unwidened, in_the_cache
from zero.shards.offload import Offload, SteppedGroup, part_of


class OnHost(Offload):
    """`by_group`: whether groups are stepped one after another also at stage 3, where the optimizer is the user's."""

    active, by_group = True, False

    def narrow(self, gradient: Tensor, arriving: Any, stepped: Tensor) -> tuple[Tensor, Any]:
        if gradient.dtype == stepped.dtype or not has_values(gradient):
            return super().narrow(gradient, arriving, stepped)
        unwidened = Unwidened(gradient, arriving, stepped.dtype)
        return unwidened.gradient, unwidened

    def at_once(self) -> int:
        """Returns how many elements of a group `step_part` is given at a time."""
        return in_the_cache()

    def copied(self, there: Tensor, sums: Tensor, own: Sequence[Tensor]) -> None:
        norms.note(there, sums, own)

    def known_norms(self, gradients: Sequence[Tensor], norm_type: float) -> Mapping[int, Tensor]:
        return norms.known(gradients, norm_type)

    def step_group(
        self,
        group: SteppedGroup,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        then: Callable[[slice], None] | None = None,
    ) -> None:
        if not has_values(group.main):
            super().step_group(group, optimizer, params, then)
            return
        step = GroupStep(group, part_of(optimizer, params), then)
        step.wait_for_copies()
        step.take(self.step_part, self.at_once())

    def before_step(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], groups: Sequence[SteppedGroup], *, closure: bool
    ) -> None:
        if closure or type(optimizer) not in ELEMENTWISE or not self.by_group:
            return
        held = {*params}
        for group in groups:
            own = [param for param in group.params if param in held]
            if any(param.grad is not None for param in own):
                self.step_group(group, optimizer, own)
        taken = {param: param.grad for param in params if param.grad is not None}
        for param in taken:  # the optimizer's own step is to leave these
            param.grad = None
        _taken.setdefault(optimizer, {}).update(taken)

    def after_step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        for param, gradient in _taken.pop(optimizer, {}).items():
            param.grad = gradient


# Gradients of what was stepped by group, until the optimizer's own step has returned.
_taken: WeakKeyDictionary[Optimizer, dict[nn.Parameter, Tensor]] = WeakKeyDictionary()
