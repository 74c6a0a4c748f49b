"""Steps the user's optimizer in backward: each unit as soon as its gradients are reduced."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from zero.checks.guard import guard_of
from zero.features.step_in_backward.optimizer import InBackward, problem_of, refuse
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit
from zero.shards.steps import Steps, stepped_by


class StepsInBackward(Steps):
    """Steps one optimizer of an FSDP's parameters in backward. See zero.step_in_backward.

    Raises ValueError for optimizers that may need all gradients at once, or that lack trained parameters.
    """

    def __init__(self, optimizer: Optimizer, model: Model) -> None:
        problem = problem_of(optimizer)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        missing = next((param for param in model.index if param.requires_grad and param not in held), None)
        if problem is None and missing is not None:
            problem = (
                "zero.step_in_backward was given an optimizer that lacks some trained parameters of the model, whose "
                "gradients would not be freed. Give the optimizer all trained parameters."
            )
        if problem is not None:
            raise ValueError(problem)
        self._reference = ref(optimizer)
        self._guard = guard_of(model)
        self._stepped: set[Unit] = set()
        """Units that were stepped in the running backward."""
        self._in_backward = InBackward()
        stepped_by[optimizer] = self
        optimizer.register_step_post_hook(self._after_step)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError(
                "the optimizer that zero.step_in_backward was given exists no more, so nobody steps. Keep it while the "
                "model trains."
            )
        return optimizer

    def _after_step(self, *_: Any) -> None:
        self._in_backward.stepped = False

    def begin(self) -> None:
        """Begins a backward. Raises RuntimeError for a second one before step(), and after an interrupted one."""
        self._in_backward.begin()
        self._stepped.clear()  # an error may have ended the last backward
        self._guard.before_steps_in_backward(self._optimizer)

    def refuse(self, what: str, remedy: str) -> None:
        refuse(what, remedy)

    def entering(self, unit: Unit) -> None:
        """Raises RuntimeError if the running backward has stepped the unit, which it now reaches again."""
        if unit in self._stepped:
            raise RuntimeError(
                f"backward reached {unit.title} of FSDP again, through the graph of another forward, after "
                "zero.step_in_backward had stepped it. Run backward after each forward, or step after backward."
            )

    def reduced(self, unit: Unit) -> None:
        """Steps the unit, whose reduction is complete, except for parameters that not all ranks have used."""
        if unit.at_rest:
            self._step(unit)
            self._stepped.add(unit)

    def _step(self, unit: Unit) -> None:
        with_gradients = [param for param in unit.params if param.grad is not None]
        if with_gradients:
            unit.settle()
            self._in_backward.step_begins()
            with torch.no_grad():
                self._guard.step(self._optimizer, with_gradients)
            for param in with_gradients:
                param.grad = None

    def end(self, units: Collection[Unit]) -> None:
        """Ends the backward, when all units are at rest: steps the remaining parameters."""
        for unit in units:
            self._step(unit)
        self._stepped.clear()
        self._in_backward.end()
