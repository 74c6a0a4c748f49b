"""Where shards lie in the memory of the CPU, or in mapped files, and the optimizer steps them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.tensors import has_values
from zero.offload import norms
from zero.offload.pieces import GroupStep, Unwidened, in_the_cache
from zero.shards.offload import Offload, SteppedGroup, part_of


class OnHost(Offload):
    active = True

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
        group.wait_for_copies()
        step.take(self.step_part, self.at_once())
