"""The seams around the steps of an optimizer of shards.

Steps       steps that are taken before all gradients are there; by default none
StepCheck   what is checked before and after a step; by default nothing
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer


class Steps:
    """Steps nothing: the optimizer does so when the user calls it.

    The backward calls it on every rank alike: at stage 3 with units, at stage 2 with shard groups. A feature gives its
    own to a living model or OSS by `put_steps`.

    `asked_by`: the function by which the user asked for them. `does`: what they do, in words for the user.
    """

    asked_by = does = ""

    def begin(self) -> None:
        """A backward that reduces its gradients begins. May raise RuntimeError."""

    def entering(self, unit: Any) -> None:
        """Backward reaches a unit, perhaps again. May raise RuntimeError."""

    def reduced(self, unit: Any) -> None:
        """The gradients of a unit or shard group are reduced, except of parameters that not all ranks have used."""

    def join(self) -> None:
        """Waits for the steps so far. Gradients that only other ranks have are added next."""

    def end(self, units: Collection[Any]) -> None:
        """Collective. The backward has ended, and all gradients are reduced; nobody else has read them yet."""

    def step(self, run: Callable[..., Any], closure: Callable[[], float] | None, given: dict[str, Any]) -> Any:
        """The user calls the step of an OSS. run: steps it, and returns the closure's loss."""
        return run(closure, given)

    def refuse(self, what: str, remedy: str) -> None:
        """Raises RuntimeError for a call that needs all gradients after backward, if there are none by then."""


NO_STEPS = Steps()


def taken_problem(holder: Any, kind: type[Steps]) -> str | None:
    """Returns an error message if a Model or an OSS has steps already, which those of this kind would replace."""
    before: Steps = holder.steps
    if not before.asked_by:
        return None
    if before.asked_by == kind.asked_by:
        return f"{kind.asked_by} was called before for this model and optimizer. Call it once."
    return (
        f"{kind.asked_by} {kind.does}, and {before.asked_by}, which was called before for this model and optimizer, "
        f"{before.does}. Call only one of them."
    )


def put_steps(steps: Steps, into: Any) -> None:
    """Has a Model of stage 3 or an OSS call these from its next backward on."""
    into.steps = steps


stepped_by: WeakKeyDictionary[Optimizer, Steps] = WeakKeyDictionary()
"""What steps an optimizer in backward."""


def steps_of(optimizer: Optimizer) -> Steps:
    return stepped_by.get(optimizer, NO_STEPS)


class StepCheck:
    """Checks nothing. A subclass in `checks` is made for each OSS. Error messages that it returns raise RuntimeError on
    every rank."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def changed(self) -> str | None:
        """Returns an error message if the optimizer, its groups or parameters were changed so that it cannot step."""
        return None

    def gradients(self, found: bool) -> str | None:
        """Returns an error message if the gradients cannot be stepped. found: whether there are any."""
        return None

    def begins(self) -> None:
        """The inner optimizer is about to step, or gets a closure."""

    def numbers(self) -> Tensor | None:
        """Returns float64 numbers after a step, whose maximum over the ranks is given to `judge`; None for none. On all
        ranks or none."""
        return None

    def judge(self, maxima: Tensor) -> str | None:
        """Returns an error message for the maxima of `numbers`."""
        return None

    def around_hook(self) -> AbstractContextManager[Any]:
        """Collective. Returns a context in which a hook of the user's may change gradients of shards."""
        return nullcontext()

    def closure_failed(self, error: Exception) -> None:
        """The user's closure raised an error, to which a note may be added."""


checks: list[Callable[[Any], StepCheck]] = []
