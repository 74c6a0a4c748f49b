"""Optimizer steps in backward: each shard group is stepped as soon as its gradients are reduced, and these are freed
(the fused update of K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023,
section 3.1; here only for optimizers whose step treats each element by itself)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from weakref import proxy

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zero.measure.kinds import ELEMENTWISE
from zero.oss import OSS
from zero.shards.shard_group import ShardGroup
from zero.shards.steps import Steps, stepped_by

_REFUSED = (
    "{} cannot go with zero.step_in_backward: parameters are stepped, and their gradients freed, before all gradients "
    "are there. {}"
)


def refuse(what: str, remedy: str) -> None:
    """Raises RuntimeError for a feature that needs the gradients after backward."""
    raise RuntimeError(_REFUSED.format(what, remedy))


def problem_of(optimizer: Optimizer) -> str | None:
    """The error message if the optimizer cannot step parameters one after another; None if it can."""
    if type(optimizer) in ELEMENTWISE:
        return None
    known = ", ".join(sorted(one.__name__ for one in ELEMENTWISE))
    return (
        f"{type(optimizer).__name__} cannot step in backward: only of torch's optimizers that treat each element by "
        f"itself is it known that they step one parameter as they step all ({known}). Take one, or step after backward."
    )


class InBackward:
    """Tracks the steps of one optimizer in backward, from one step() to the next.

    `stepped`: whether a backward is complete, with all its steps.
    """

    def __init__(self) -> None:
        self.stepped = False
        self._partly = False

    def begin(self) -> None:
        """Begins a backward. Raises RuntimeError for a second one before step(), and after an interrupted one."""
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
        """Ends the backward."""
        self._partly, self.stepped = False, True


class StepsOfOSS(Steps):
    """Steps the shards of an OSS in backward; its `step` brings everyone's to every rank.

    Raises ValueError for optimizers that may need all gradients, below stage 2, and where it was called before.
    """

    def __init__(self, optimizer: OSS) -> None:
        problem = problem_of(optimizer.optim)
        if not optimizer.gradients_arrive_sharded:
            problem = "zero.step_in_backward needs ShardedDDP or FSDP: at stage 1 gradients are averaged by others."
        elif type(optimizer.steps) is not Steps:
            problem = "zero.step_in_backward was called before for this optimizer."
        if problem is not None:
            raise ValueError(problem)
        self._oss: OSS = proxy(optimizer)
        self._in_backward = InBackward()
        stepped_by[optimizer] = self

    def begin(self) -> None:
        self._in_backward.begin()
        with torch.no_grad():
            self._oss.stepper.begin()

    def reduced(self, group: ShardGroup) -> None:
        self._in_backward.step_begins()
        with torch.no_grad():
            self._oss.shards.step_group(self._oss.optim, group)
        self._oss.shards.drop_gradients([group])
        increment_version([*group.params])  # so that autograd refuses tensors that it saved of them

    def end(self, units: Collection[ShardGroup]) -> None:
        for group in units:
            if any(self._oss.part(param).grad is not None for param in group.params):
                self.reduced(group)
        self._in_backward.end()

    def step(self, run: Callable[..., Any], closure: Callable[[], float] | None, given: dict[str, Any]) -> Any:
        """Collective. Gathers the shards that were stepped in backward."""
        if given:
            self.refuse(f"an argument of step ({', '.join(given)})", "Leave it out.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward.stepped:
            self._oss.stepper.refuse_changes()
            self._oss.stepper.end()
            self._in_backward.stepped = False
        return loss

    def refuse(self, what: str, remedy: str) -> None:
        refuse(what, remedy)
