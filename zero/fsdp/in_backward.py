"""Steps that a user's optimizer takes in backward: of each unit as soon as its gradients are with their owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.fsdp.guard import Guard
from zero.fsdp.unit import Unit
from zero.oss.in_backward import InBackward, problem_of


class StepsInBackward:
    """Of one optimizer over an FSDP's parameters. See zero.step_in_backward.

    Raises ValueError for optimizers that may need all gradients.
    """

    def __init__(self, optimizer: Optimizer, guard: Guard, params: Iterable[nn.Parameter]) -> None:
        problem = problem_of(optimizer)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        missing = next((param for param in params if param.requires_grad and param not in held), None)
        if problem is None and missing is not None:
            problem = (
                "zero.step_in_backward was given an optimizer without some trained parameters of the model, whose "
                "gradients nobody would free. Give it all that are trained."
            )
        if problem is not None:
            raise ValueError(problem)
        self._optimizer, self._guard = optimizer, guard
        self._done: set[Unit] = set()
        """Units that were stepped in this backward."""
        self._in_backward = InBackward(optimizer)
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._in_backward.stepped = False

    def begin(self) -> None:
        """Of a backward. Raises RuntimeError for a second one before step(), and after one that was interrupted."""
        self._in_backward.begin()
        self._done.clear()  # an error may have ended the last one
        self._guard.before_steps_in_backward(self._optimizer)

    def refuse_again(self, unit: Unit) -> None:
        """Backward comes to the unit. Raises RuntimeError where it has been there."""
        if unit in self._done:
            raise RuntimeError(
                f"backward came to {unit.title} of FSDP again, by the graph of another forward, after "
                "zero.step_in_backward had stepped it. Run backward after each forward, or step after backward."
            )

    def reduced(self, unit: Unit) -> None:
        """The unit's gradients are with their owners, but for those that ranks have not all used."""
        if unit.at_rest:
            self._step(unit)
            self._done.add(unit)

    def _step(self, unit: Unit) -> None:
        arrived = [param for param in unit.params if param.grad is not None]
        if arrived:
            unit.settle()
            self._in_backward.step_begins()
            with torch.no_grad():
                self._guard.step(self._optimizer, arrived)
            for param in arrived:
                param.grad = None

    def end(self, units: Iterable[Unit]) -> None:
        """Of the backward, when all units are at rest."""
        for unit in units:
            self._step(unit)
        self._done.clear()
        self._in_backward.end()
