"""Refuses steps that would be wrong for sharded parameters, and parameters that were moved, cast or given other data.

At stage 3 the optimizer is the user's own and knows nothing of shards. torch calls hooks before each step of any
optimizer; the hook here checks the step if the optimizer holds parameters of an FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero._torch import params_of_each
from zero.fsdp.model import Model
from zero.fsdp.optimizer_state import problem_of_state, register
from zero.fsdp.unit import TrainingState, Unit
from zero.measure.built import around, finding_of_built
from zero.measure.kinds import Finding, Kind, known, title
from zero.measure.numbers import Written, differs
from zero.measure.param_groups import SHARD_MARK
from zero.oss.dtensor_checks import refuse_dtensors
from zero.shards.offload import Offload
from zero.shards.partition import optimizer_problem
from zero.shards.shard_group import moved_problem
from zero.tensor_parallel import table


@dataclass(frozen=True)
class _Measured:
    """What an optimizer was found to need, when it had so many groups.

    problem: why it cannot step shards. tensorwise: the name of an optimizer that needs uncut parameters, and why.
    writes_numbers: whether it may write numbers into its groups, as torch's own do not.
    """

    groups: int
    problem: str | None
    tensorwise: tuple[str, Finding] | None
    writes_numbers: bool


class Guard:
    """Checks every step of any optimizer that holds parameters of these units, as long as the guard exists. The step
    raises RuntimeError on every rank if it would be wrong on any."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._module_params = {*model.module.parameters()}
        self._index, self._comm = model.index, model.comm
        self._findings: WeakKeyDictionary[Optimizer, _Measured] = WeakKeyDictionary()
        self._not_owned = [param for param, place in self._index.items() if place.span is None]
        # Gradients of parameters of which this rank owns nothing, while an optimizer steps.
        self._hidden: dict[nn.Parameter, Tensor] = {}
        self._offloads = any(group.offload.active for group in model.index.groups)
        # The numbers in the groups of optimizers that are stepping, except of torch's own, which write none.
        self._before: WeakKeyDictionary[Optimizer, Written] = WeakKeyDictionary()
        self._numbers = model.comm.channel("the numbers that ranks compare after the step of an optimizer")
        _watch_steps()
        _guards[:] = [guard for guard in _guards if guard() is not None]
        _guards.append(ref(self))

    def before_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Collective, if the optimizer holds any of these parameters. Returns a closure that checks after `closure`."""
        params = self._sharded_params(optimizer)
        if not params:
            return closure
        self.model.schedule.stepping = True
        register(self.model, optimizer)
        if closure is None:
            self._check(optimizer, params)
            self._hide_empty()
        if self._measured(optimizer).writes_numbers:
            self._before[optimizer] = Written(optimizer)
        for offload, own in self._by_offload(params).items() if self._offloads else ():
            groups = [*dict.fromkeys(self._index[param].group for param in own)]
            offload.before_step(optimizer, own, groups, closure=closure is not None)
        if closure is None:
            return None

        def call_and_check() -> Any:
            loss = closure()
            self._check(optimizer, params)
            self._hide_empty()
            return loss

        return call_and_check

    def after_step(self, optimizer: Optimizer) -> None:
        """Collective, if the optimizer is not torch's own. Raises RuntimeError on every rank if it has written numbers
        that differ between ranks."""
        params = self._sharded_params(optimizer)
        self.model.schedule.stepping = False
        while self._hidden:
            param, gradient = self._hidden.popitem()
            param.grad = gradient if param.grad is None else param.grad
        for offload, own in self._by_offload(params).items() if self._offloads else ():
            offload.after_step(optimizer, own)
        # Graphs that saved a parameter before the step are refused in backward, on every rank at the same place: a rank
        # that owns nothing of a parameter has an empty gradient where others have theirs.
        increment_version([param for param in params if param.grad is not None])
        before = self._before.pop(optimizer, None)
        if before is not None:
            written = before.as_tensor(optimizer)
            self._comm.all_reduce(written, maximum=True, channel=self._numbers)
            problem = differs(written, optimizer)
            if problem is not None:
                raise RuntimeError(problem)

    def _hide_empty(self) -> None:
        """Hides gradients of which this rank owns nothing from the step: some optimizers divide by the number of
        elements."""
        for param in self._not_owned:
            if param.grad is not None:
                self._hidden[param], param.grad = param.grad, None

    def _sharded_params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [param for group in optimizer.param_groups for param in group["params"] if param in self._index]

    def _by_offload(self, params: Sequence[nn.Parameter]) -> dict[Offload, Sequence[nn.Parameter]]:
        offloads = {group.offload for group in self._index.groups}
        if len(offloads) == 1:  # but for models that took over an FSDP with another
            return {offloads.pop(): params}
        found: dict[Offload, list[nn.Parameter]] = {}
        for param in params:
            found.setdefault(self._index[param].group.offload, []).append(param)
        return {**found}

    def _check(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Collective. Raises RuntimeError on every rank if a step would be wrong on any."""
        self.model.scaling.compare(next(filter(None, self._problems(optimizer, params)), None))
        for group in optimizer.param_groups:
            group.pop(SHARD_MARK, None)  # load_state_dict() leaves the mark of this rank's shard here

    def _problems(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Iterator[str | None]:
        """Yields error messages of what is wrong on this rank, None for what is not. The first message counts."""
        found = self._measured(optimizer)
        yield found.problem
        yield moved_problem(group for unit in self._index.units if not unit.summoned for group in unit.groups)
        yield from self._problems_of_new_parameters()
        if any(SHARD_MARK in group for group in optimizer.param_groups):
            yield problem_of_state(self.model, optimizer)
        units = [*dict.fromkeys(map(self._index.unit_of, params))]
        _reshard_idle(units)
        for param in params:
            if param.grad is not None:
                yield from self._problems_of(param, optimizer, found.tensorwise)

    def _measured(self, optimizer: Optimizer) -> _Measured:
        """Measures an optimizer at its first step, and again if the number of its groups has changed."""
        found = self._findings.get(optimizer)
        if found is None or found.groups != len(optimizer.param_groups):
            found = self._findings[optimizer] = self._measure(optimizer)
        return found

    def _measure(self, optimizer: Optimizer) -> _Measured:
        """Measures the optimizer, and optimizers around it that step by it (SAM)."""
        each = (*around(optimizer), optimizer) if self._comm.world > 1 else ()
        findings = {title(type(one)): finding_of_built(one) for one in each}
        problems = [
            optimizer_problem(name, finding, self.model.partition, of="FSDP")
            for name, finding in findings.items()
            if finding.kind is not Kind.TENSORWISE  # refused only if a parameter with a gradient is cut
        ]
        return _Measured(
            groups=len(optimizer.param_groups),
            problem=next(filter(None, problems), None),
            tensorwise=next((pair for pair in findings.items() if pair[1].kind is Kind.TENSORWISE), None),
            writes_numbers=known(type(optimizer)) is None,
        )

    def _problems_of_new_parameters(self) -> Iterator[str]:
        module, known = self.model.module, self._module_params
        new = {param for param in params_of_each(module) if param not in known and param.grad is not None}
        for name, param in module.named_parameters() if new else ():
            if param in new:
                if any(param is ignored for module in self.model.ignored for ignored in module.parameters()):
                    continue
                yield (
                    f"{name!r} is in no unit of FSDP: it was replaced (by load_state_dict with assign=True, say) or "
                    "added since the model was wrapped, and FSDP does not average its gradient. Change the model "
                    "first, then wrap it; or list its module in ignored_modules, and average its gradient yourself."
                )

    def _problems_of(
        self, param: nn.Parameter, optimizer: Optimizer, tensorwise: tuple[str, Finding] | None
    ) -> Iterator[str]:
        """tensorwise: name and finding of an optimizer that needs uncut parameters, if there is one."""
        unit, (group, index) = self._index.unit_of(param), self._index[param]
        name, kind = group.names[index], type(optimizer).__name__
        if unit.summoned or unit.state is not TrainingState.IDLE:
            yield (
                f"{name!r} is unsharded, not this rank's shard, while {kind}.step() is called: backward is not "
                "complete, or this is inside summon_full_params(). Step after backward, outside it."
            )
        if unit.buckets[unit.groups.index(group)].unreduced(index):
            yield (
                f"{name!r} has a gradient that was not reduced: the last backward ran under no_sync(). Run the last "
                "backward before step() outside it."
            )
        if tensorwise is not None and group.layout.numels[index] != param.numel() != 0:
            yield (
                f"{tensorwise[0]} needs each parameter whole, but {name!r} is cut between ranks: "
                f"{tensorwise[1].reason}. Wrap the model with FSDP(partition='whole')."
            )
        full_shape = group.shapes.full[index]
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == full_shape != param.shape:
                yield (
                    f"the state {key!r} of {name!r} has the shape of the full parameter, {list(full_shape)}, but "
                    f"this rank steps a shard of shape {list(param.shape)}. It was made before wrapping, or loaded "
                    "full: wrap before the first step, and load state of the same shards."
                )


def _reshard_idle(units: Sequence[Unit]) -> None:
    """Reshards units that a forward without a backward, such as an evaluation, has left unsharded."""
    for unit in units:
        if unit.state is TrainingState.IDLE and not unit.summoned:
            unit.reshard()
            unit.synchronize()  # transfers that an interrupted backward has launched may still read the shards


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks a step of any optimizer; replaces the closure. args: those of torch, the optimizer itself first."""
    if table.made:
        refuse_dtensors(optimizer)  # before the collectives below; its own hook may come after this one
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


# Those of all models that exist, in the order of their construction, which is the same on all ranks.
_guards: list[ReferenceType[Guard]] = []


def _alive() -> list[Guard]:
    return [guard for reference in _guards if (guard := reference()) is not None]


@cache
def _watch_steps() -> None:
    """Has torch call the guards around each step of any optimizer, from the first FSDP on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
