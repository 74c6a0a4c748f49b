"""`zero.step_in_backward`: what is stepped as soon as its gradients are reduced, which are then freed (the fused update
of K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023, section 3.1; here
only for optimizers whose step treats each element by itself).

StepsOfOSS       shard groups of an OSS, at stage 2
StepsOfUnits     units, by the user's optimizer, at stage 3

Shards in the memory of the CPU are stepped in a thread beside backward (worker.py), which goes on launching kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn
from weakref import proxy, ref

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zero._torch import uncompiled
from zero.checks.guard import guard_of
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of
from zero.shards.shard_group import ShardGroup
from zero.shards.steps import Steps, put_steps, stepped_by, taken_problem


def step_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    """From now on backward steps parameters as soon as their gradients are with their owner, and frees these.

        zero.step_in_backward(model, optimizer)
        model(inputs).backward()  # steps
        optimizer.step()          # stage 2: brings the stepped shards to every rank; stage 3: nothing is left to do

    A step is as without, bit for bit, and no shard of the gradients outlasts its bucket or unit: with Adam a rank of W
    keeps 12 bytes a parameter / W at stage 3, and 4 + 8 / W at stage 2, where 16 / W and 4 + 12 / W are kept without.
    Call `step` and `zero_grad` as ever, and schedulers after `step`.

    model: a ShardedDDP, of whose optimizers this is one, or an FSDP.
    optimizer: the OSS, or at stage 3 a torch optimizer of all trained parameters, that treats each element by itself.

    What needs all gradients at once raises RuntimeError from then on: clipping by the norm, zero.GradScaler, no_sync, a
    second backward before `step`, a hook before the step. torch.nn.utils.clip_grad_norm_ raises at stage 2; at
    stage 3 it finds no gradients.
    Raises ValueError for other models and optimizers, and where it or zero.fault_tolerant was called before.
    """
    model = uncompiled(model)
    if isinstance(model, FSDP) and not isinstance(optimizer, OSS):
        running = running_model(model)
        _refuse(optimizer, running)
        held = {*params_of(optimizer)}
        if any(param.requires_grad and param not in held for param in running.index):
            raise ValueError(
                "zero.step_in_backward was given an optimizer that lacks some trained parameters of the model, whose "
                "gradients would not be freed. Give the optimizer all trained parameters."
            )
        put_steps(StepsOfUnits(optimizer, running), running)
    elif isinstance(model, ShardedDDP) and isinstance(optimizer, OSS):
        if optimizer not in sharding_of(model):
            raise ValueError("zero.step_in_backward was given the optimizer of another model. Pass this model's OSS.")
        _refuse(optimizer.optim, optimizer)
        put_steps(StepsOfOSS(optimizer), optimizer)
    else:
        raise ValueError(
            f"zero.step_in_backward was given a {type(model).__name__} and a {type(optimizer).__name__}. Pass a "
            "ShardedDDP and its OSS, or an FSDP and a torch optimizer of its parameters."
        )


def _refuse(optimizer: Optimizer, holder: Model | OSS) -> None:
    """Raises ValueError if the optimizer cannot step parameters one after another, or the holder has other steps."""
    problem = taken_problem(holder, StepsInBackward)
    if problem is not None:
        raise ValueError(problem)
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(sorted(one.__name__ for one in ELEMENTWISE))
        raise ValueError(
            f"{type(optimizer).__name__} cannot step in backward: only of torch's optimizers that treat each element "
            f"by itself is it known that they step one parameter as they step all ({known}). Take one, or step after "
            "backward."
        )


class StepsInBackward(Steps):
    """Tracks the steps of one optimizer in backward, from one step() to the next.

    `stepped`: whether a backward is complete, with all its steps.
    """

    asked_by = "zero.step_in_backward"
    does = "steps parameters, and frees their gradients, before backward has ended"

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepped = self._partly = False
        self._begun: list[ShardGroup] = []
        """Shard groups whose steps may run beside."""
        stepped_by[optimizer] = self

    def join(self) -> None:
        begun, self._begun = self._begun, []
        errors: list[Exception] = []
        for group in begun:
            try:
                if not group.home.overlaps:
                    group.finish_step(told=bool(errors))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def begin(self) -> None:
        """Begins a backward. Raises RuntimeError for a second one before step(), and after an interrupted one."""
        if self._partly:
            with suppress(Exception):  # of steps beside the last backward
                self.join()
            raise RuntimeError(
                "an error ended the last backward after zero.step_in_backward had stepped some parameters. Load a "
                "checkpoint to go on."
            )
        if self.stepped:
            self.refuse(
                "a second backward before step()", "Call step() after each, or step after backward to accumulate."
            )

    def end(self, units: Collection[Any]) -> None:
        self._partly, self.stepped = False, True

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise RuntimeError(
            f"{what} cannot go with zero.step_in_backward: parameters are stepped, and their gradients freed, before "
            f"all gradients are there. {remedy}"
        )


class StepsOfOSS(StepsInBackward):
    """Steps the shards of an OSS in backward; its `step` brings everyone's to every rank."""

    def __init__(self, optimizer: OSS) -> None:
        super().__init__(optimizer)
        self._oss: OSS = proxy(optimizer)

    def begin(self) -> None:
        super().begin()
        with torch.no_grad():
            self._oss.stepper.begin()

    def reduced(self, group: ShardGroup) -> None:
        self._partly = True
        self._oss.shards.step_group(self._oss.optim, group, beside=True, urgent=True)
        self._oss.shards.drop_gradients([group])
        self._begun.append(group)
        increment_version([*group.params])  # so that autograd refuses tensors that it saved of them

    def end(self, units: Collection[ShardGroup]) -> None:
        for group in units:
            if any(self._oss.shards[param].grad is not None for param in group.params):
                self.reduced(group)
        self.join()
        super().end(units)

    def step(self, run: Callable[..., Any], closure: Callable[[], float] | None, given: dict[str, Any]) -> Any:
        """Collective. Gathers the shards that were stepped in backward."""
        if given:
            self.refuse(f"an argument of step ({', '.join(given)})", "Leave it out.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.stepped:
            self._oss.stepper.refuse_changes()
            self._oss.stepper.end()
            self.stepped = False
        return loss


class StepsOfUnits(StepsInBackward):
    """Steps one optimizer of an FSDP's parameters in backward."""

    def __init__(self, optimizer: Optimizer, model: Model) -> None:
        super().__init__(optimizer)
        self._reference, self._guard = ref(optimizer), guard_of(model)
        self._done: set[Unit] = set()
        """Units that were stepped in the running backward."""
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
        self.stepped = False

    def begin(self) -> None:
        super().begin()
        self._done.clear()  # an error may have ended the last backward
        self._guard.before_steps_in_backward(self._optimizer)

    def entering(self, unit: Unit) -> None:
        """Raises RuntimeError if the running backward has stepped the unit, which it now reaches again."""
        if unit in self._done:
            raise RuntimeError(
                f"backward reached {unit.title} of FSDP again, through the graph of another forward, after "
                "zero.step_in_backward had stepped it. Run backward after each forward, or step after backward."
            )

    def reduced(self, unit: Unit) -> None:
        """Steps the unit, whose reduction is complete, except for parameters that not all ranks have used."""
        if unit.at_rest:
            self._step(unit)
            self._done.add(unit)

    def _step(self, unit: Unit) -> None:
        """Also where only other ranks own shards: what is gathered ahead depends on pending steps."""
        self._partly = True
        for group in unit.groups:
            own = [param for param in group.params if param.grad is not None]
            group.home.step_group(group, self._optimizer, own, beside=True, urgent=True)
            self._begun.append(group)
            for param in own:
                param.grad = None

    def end(self, units: Collection[Unit]) -> None:
        """Steps the remaining parameters, when all units are at rest."""
        for unit in units:
            if any(param.grad is not None for param in unit.params):
                self._step(unit)
        self.join()
        self._done.clear()
        super().end(units)
