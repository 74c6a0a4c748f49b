"""Steps that are taken in backward: of each flat group as soon as its gradients are with their owner, which are freed
then (the fused update of K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
2023, section 3.1; here for optimizers that treat each element by itself)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero.measure.kinds import ELEMENTWISE
from zero.oss.shard_group import ShardGroup
from zero.oss.stepping import Stepping

_REFUSED = (
    "{} cannot go with zero.step_in_backward: parameters are stepped, and their gradients freed, before all gradients "
    "are there. {}"
)


def refuse(what: str, remedy: str) -> None:
    """Raises RuntimeError for what would need the gradients after backward."""
    raise RuntimeError(_REFUSED.format(what, remedy))


def problem_of(optimizer: Optimizer) -> str | None:
    """Why the optimizer cannot step parameters one after another, in words for the user; None if it can."""
    if type(optimizer) in ELEMENTWISE:
        return None
    known = ", ".join(sorted(one.__name__ for one in ELEMENTWISE))
    return (
        f"{type(optimizer).__name__} cannot step in backward: only of torch's optimizers that treat each element by "
        f"itself is it known that they step one parameter as they step all ({known}). Take one, or step after backward."
    )


class InBackward:
    """What one optimizer has stepped since its last step().

    `stepped`: whether a backward is complete, and its steps are taken.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepped = False
        self._partly = False
        _all.add(optimizer)

    def begin(self) -> None:
        """Of a backward. Raises RuntimeError for a second one before step(), and after one that was interrupted."""
        if self._partly:
            raise RuntimeError(
                "an error ended the last backward after zero.step_in_backward had stepped some parameters. Load a "
                "checkpoint to go on."
            )
        if self.stepped:
            refuse("a second backward before step()", "Call step() after each, or step after backward to accumulate.")

    def step_begins(self) -> None:
        self._partly = True

    def end(self) -> None:
        """Of the backward."""
        self._partly, self.stepped = False, True


_all: WeakSet[Optimizer] = WeakSet()


def steps_in_backward(optimizer: Optimizer) -> bool:
    return optimizer in _all


class SteppingInBackward(Stepping):
    """An OSS that may step so; see zero.step_in_backward."""

    _in_backward: InBackward | None = None

    def step_in_backward(self) -> None:
        """From now on this rank's shards are stepped in backward, and `step` brings everyone's to every rank.

        Raises ValueError for optimizers that may need all gradients, below stage 2, and where it was called before.
        """
        problem = problem_of(self.optim)
        if not self.gradients_arrive_sharded:
            problem = "zero.step_in_backward needs ShardedDDP or FSDP: at stage 1 gradients are averaged by others."
        elif self._in_backward is not None:
            problem = "zero.step_in_backward was called before for this optimizer."
        if problem is not None:
            raise ValueError(problem)
        self._in_backward = InBackward(self)

    def backward_begins(self) -> None:
        """Of a backward that reduces gradients to their owners."""
        if self._in_backward is not None:
            self._in_backward.begin()
            with torch.no_grad():
                self._refuse_changes()
                self._shards.masters.refresh()
                self._hand_options()

    def gradients_arrived(self, flat: ShardGroup) -> None:
        """Those of the flat group are with their owners, but for those that ranks have not all used."""
        if self._in_backward is not None:
            self._in_backward.step_begins()
            with torch.no_grad():
                self._shards.step_group(self.optim, flat)
            self._shards.drop_gradients([flat])
            increment_version([*flat.params])  # autograd refuses to compute with what it saved of them

    def backward_ends(self) -> None:
        """All gradients are with their owners."""
        self.arrive()
        if self._in_backward is not None:
            for flat in self.shard_groups:
                if any(self.part(param).grad is not None for param in flat.params):
                    self.gradients_arrived(flat)
            self._in_backward.end()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """As Stepping.step; what was stepped in backward is only brought to every rank."""
        if self._in_backward is None:
            return super().step(closure, **options)
        if options:
            refuse(f"an argument of step ({', '.join(options)})", "Leave it out.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward.stepped:
            self._refuse_changes()
            self._end_step()
            self._in_backward.stepped = False
        return loss

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As Stepping.clip_grad_norm."""
        if self._in_backward is not None:
            refuse("clipping by the norm of all gradients", "Step after backward, or clip values in hooks.")
        return super().clip_grad_norm(max_norm, norm_type)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As Stepping.register_step_pre_hook."""
        if self._in_backward is not None:
            refuse("a hook before the step", "Register it on the parameters, or step after backward.")
        return super().register_step_pre_hook(hook)
