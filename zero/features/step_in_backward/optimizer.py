"""Optimizer steps in backward: each shard group is stepped as soon as its gradients are reduced, and these are freed
(the fused update of K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023,
section 3.1; here only for optimizers whose step treats each element by itself)."""

from __future__ import annotations

from weakref import WeakSet

from torch.optim import Optimizer

from zero.measure.kinds import ELEMENTWISE

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

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepped = False
        self._partly = False
        _all.add(optimizer)

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


_all: WeakSet[Optimizer] = WeakSet()


def steps_in_backward(optimizer: Optimizer) -> bool:
    return optimizer in _all
