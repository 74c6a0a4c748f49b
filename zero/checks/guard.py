"""Refuses steps that would be wrong for sharded parameters, and parameters that were moved, cast or given other data.

At stage 3 the optimizer is the user's own and knows nothing of shards. torch calls hooks before each step of any
optimizer; the hook here checks the step if the optimizer holds parameters of an FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero.checks.measured import Measured
from zero.checks.overflow import Overflow
from zero.checks.scaling import Scaling
from zero.fsdp.events import ModelEvents, makers
from zero.fsdp.model import Model, models
from zero.fsdp.unit import TrainingState, Unit
from zero.measure.kinds import Finding, Kind
from zero.measure.numbers import differs
from zero.measure.param_groups import SHARD_MARK
from zero.sdp.wrapper import refuse_steps
from zero.shards.home import Home
from zero.shards.partition import optimizer_problem
from zero.state.user_optimizer import StateHooks, SteppedShards, refuse_other_shards

_registered: list[Any] = []


class Guard(ModelEvents):
    """Checks every step of any optimizer that holds parameters of these units, as long as the guard exists.

    The step raises RuntimeError on every rank if, on any, parameters are unsharded or were given other data; the module
    has new parameters with gradients; gradients are unreduced (no_sync) or scaled by each rank separately; optimizer
    state is not that of the shards; the optimizer couples parameters, or needs uncut parameters where they are cut; or
    the optimizer has written numbers into its groups that differ between ranks.

    The module may only hold the parameters that it holds now, except in ignored modules.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._module_params = {*model.module.parameters()}
        self._index, self._comm = model.index, model.comm
        self._measured = Measured()
        self._overflow = Overflow(model.index.groups, model.comm)
        self._scaling = Scaling(model.comm, "clip_grad_norm_(max_norm) of the FSDP model")
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        _guards[model] = ref(self)
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before_step))
            _registered.append(register_optimizer_step_post_hook(_after_step))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped these parameters."""
        return [*self._optimizers]

    def forward_begins(self) -> None:
        self._overflow.before_forward()

    def backward_ends(self, reduced: bool) -> None:
        """Collective. Shares overflows between ranks, and remembers the complete gradients of this backward."""
        if reduced:
            self._overflow.spread()
            self._scaling.remember(self._index)

    def dismissed(self, *, unwrapped: bool) -> None:
        if unwrapped:
            refuse_steps(self.optimizers)

    def scaling(self) -> AbstractContextManager[None]:
        return self._scaling.alike()

    def _sharded_params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [param for group in optimizer.param_groups for param in group["params"] if param in self._index]

    def track(self, optimizer: Optimizer) -> None:
        """Has the optimizer mark the state that it saves as this rank's shard, and cut full state that it loads."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            alone = not any(other._sharded_params(optimizer) for other in _alive() if other is not self)
            StateHooks(optimizer, self._index.groups, self._comm, alone=alone)

    def before_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Collective, if the optimizer holds any of these parameters. Returns a closure that checks after `closure`."""
        params = self._sharded_params(optimizer)
        if not params:
            return closure
        self.track(optimizer)
        if closure is None:
            self._check(optimizer, params)
        self._measured.before_step(optimizer)
        for home, own in self._by_home(params).items():
            home.before_step(optimizer, own, closure=closure is not None)
        return None if closure is None else partial(self._call_and_check, closure, optimizer, params)

    def _call_and_check(self, closure: Callable[[], Any], optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Any:
        loss = closure()
        self._check(optimizer, params)
        return loss

    def _check(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Collective. Raises RuntimeError on every rank if a step would be wrong on any."""
        findings = self._measured.findings(optimizer) if self._comm.world > 1 else {}
        problem = self._optimizer_problem(findings) or self._model_problem() or self._state_problem(optimizer)
        if problem is None:
            units = [*dict.fromkeys(map(self._index.unit_of, params))]
            _reshard_idle(units)
            problem = self._gradients_problem(units, params, optimizer, findings)
        written = self._scaling.compare(problem, self._measured.written(optimizer))
        problem = None if written is None else differs(written, optimizer)
        if problem is not None:
            raise RuntimeError(problem)
        for group in optimizer.param_groups:
            group.pop(SHARD_MARK, None)  # load_state_dict() leaves the mark of this rank's shard here

    def after_step(self, optimizer: Optimizer) -> None:
        self._measured.after_step(optimizer)
        for home, params in self._by_home(self._sharded_params(optimizer)).items():
            home.stepped(optimizer, params)

    def before_steps_in_backward(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError for state of other parameters than the optimizer's."""
        self.track(optimizer)
        problem = self._state_problem(optimizer)
        if problem is not None:
            raise RuntimeError(problem)

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Steps only these parameters, without calling hooks."""
        for home, own in self._by_home(params).items():
            home.step(optimizer, own)

    def _by_home(self, params: Sequence[nn.Parameter]) -> dict[Home, Sequence[nn.Parameter]]:
        homes = {group.home for group in self._index.groups}
        if len(homes) == 1:  # but for models that took over an FSDP with another
            return {homes.pop(): params}
        found: dict[Home, list[nn.Parameter]] = {}
        for param in params:
            found.setdefault(self._index[param].group.home, []).append(param)
        return {**found}

    def _optimizer_problem(self, findings: dict[str, Finding]) -> str | None:
        """Returns an error message if the optimizer cannot step shards, else None. Does not look at cut parameters."""
        for name, finding in findings.items():
            problem = optimizer_problem(name, finding, self.model.partition, of="FSDP")
            if problem is not None and finding.kind is not Kind.TENSORWISE:
                return problem
        return None

    def _model_problem(self) -> str | None:
        """Returns an error message if parameters were moved or replaced, else None."""
        return self.model.moved_problem() or self._new_parameter_problem()

    def _gradients_problem(
        self,
        units: Sequence[Unit],
        params: Sequence[nn.Parameter],
        optimizer: Optimizer,
        findings: dict[str, Finding],
    ) -> str | None:
        """Returns an error message if the gradients, or the state of their parameters, cannot be stepped, else None."""
        tensorwise = next((pair for pair in findings.items() if pair[1].kind is Kind.TENSORWISE), None)
        for unit in units:
            problems = (unstepped(unit) for unstepped in self.model.events.unstepped)
            problem: str | None = next((problem for problem in problems if problem is not None), None)
            if problem is not None:
                return problem
        for param in params:
            problem = self._parameter_problem(optimizer, param, tensorwise) if param.grad is not None else None
            if problem is not None:
                return problem
        return None

    def _state_problem(self, optimizer: Optimizer) -> str | None:
        try:
            refuse_other_shards(SteppedShards(optimizer, self._index.groups, self._comm), optimizer.param_groups)
        except ValueError as error:
            return f"{type(optimizer).__name__} has loaded what does not belong to it: {error}"
        return None

    def _new_parameter_problem(self) -> str | None:
        for name, param in self.model.module.named_parameters():
            if param not in self._module_params and param.grad is not None:
                if any(param is ignored for module in self.model.ignored for ignored in module.parameters()):
                    continue
                return (
                    f"{name!r} is in no unit of FSDP: it was replaced (by load_state_dict with assign=True, say) or "
                    "added since the model was wrapped, and FSDP does not average its gradient. Change the model "
                    "first, then wrap it; or list its module in ignored_modules, and average its gradient yourself."
                )
        return None

    def _parameter_problem(
        self, optimizer: Optimizer, param: nn.Parameter, tensorwise: tuple[str, Finding] | None
    ) -> str | None:
        """See `_problem`. tensorwise: name and finding of an optimizer that needs uncut parameters, if there is one."""
        unit, (group, index) = self._index.unit_of(param), self._index[param]
        name, kind = group.names[index], type(optimizer).__name__
        if group.summoned or unit.state is not TrainingState.IDLE:
            return (
                f"{name!r} is unsharded, not this rank's shard, while {kind}.step() is called: backward is not "
                "complete, or this is inside summon_full_params(). Step after backward, outside it."
            )
        if unit.gradients.unreduced(param):
            return (
                f"{name!r} has a gradient that was not reduced: the last backward ran under no_sync(). Run the last "
                "backward before step() outside it."
            )
        cut = group.layout.numels[index] != param.numel() != 0
        if cut and tensorwise is not None:
            return (
                f"{tensorwise[0]} needs each parameter whole, but {name!r} is cut between ranks: "
                f"{tensorwise[1].reason}. Wrap the model with FSDP(partition='whole')."
            )
        full_shape = group.shapes.full[index]
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == full_shape != param.shape:
                return (
                    f"the state {key!r} of {name!r} has the shape of the full parameter, {list(full_shape)}, but "
                    f"this rank steps a shard of shape {list(param.shape)}. It was made before wrapping, or loaded "
                    "full: wrap before the first step, and load state of the same shards."
                )
        return None


def _reshard_idle(units: Sequence[Unit]) -> None:
    """Reshards units that a forward without a backward, such as an evaluation, has left unsharded."""
    for unit in units:
        if unit.state is TrainingState.IDLE and not unit.summoned:
            unit.reshard()
            unit.settle()  # transfers that an interrupted backward has launched may still read the shards


_guards: WeakKeyDictionary[Model, ReferenceType[Guard]] = WeakKeyDictionary()


def guard_of(model: Model) -> Guard:
    """Returns the guard of a model, which exists as long as the model."""
    guard = _guards[model]()
    assert guard is not None
    return guard


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks a step of any optimizer; replaces the closure. args: those of torch, the optimizer itself first."""
    positional = len(args) > 1
    original = args[1] if positional else kwargs.get("closure")
    closure = original
    for guard in _alive():
        closure = guard.before_step(optimizer, closure)
    if closure is original:
        return args, kwargs
    return ((args[0], closure, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": closure})


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for guard in _alive():
        guard.after_step(optimizer)


def _alive() -> list[Guard]:
    """Returns the guards of all models that exist, in the same order on every rank."""
    return [guard_of(model) for model in models()]


makers.append(Guard)
