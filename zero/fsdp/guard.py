"""Notices optimizers that would step sharded parameters wrongly, whoever built them, and parameters that are no longer
where they were put, or what they were.

At stage 3 the optimizer is the user's own and knows nothing of shards. torch calls hooks before any optimizer's step;
the one here looks whether the parameters of an FSDP are among those about to be stepped, and whether that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero.comm import Comm
from zero.fsdp.index import Index
from zero.fsdp.optim_state import StateHooks, SteppedShards, refuse_other_shards
from zero.fsdp.overflow import Overflow
from zero.fsdp.stepping import Stepping
from zero.fsdp.unit import TrainingState
from zero.measure.kinds import Finding, Kind
from zero.measure.numbers import differs
from zero.measure.param_groups import SHARD_MARK
from zero.oss.ddp import refuse_within_ddp
from zero.oss.disk import Disk
from zero.oss.partition import Partition, optimizer_problem
from zero.oss.scaling import Scaling
from zero.oss.shard_group import ShardGroup
from zero.oss.slices import step_alone

_guards: list[ReferenceType[Guard]] = []
"""Of every FSDP that lives, in the order in which they were made, which is the same on all ranks."""
_registered: list[Any] = []


class Guard:
    """Checks every step of any optimizer that holds parameters of these units, as long as it lives.

    The step raises RuntimeError for full parameters, for gradients left by no_sync or scaled by each rank for itself,
    for state of other shapes than the shards', for optimizers that couple parameters or need whole ones where they are
    cut, for numbers that an optimizer wrote into its groups and that differ between ranks, and where parameters were
    given other data, or the module others with gradients. It is collective, so that all ranks raise.

    module, ignored: what may hold parameters only that it holds now, but for those of the modules in it that are
        ignored.
    partition: as the user said it, whatever the optimizer.
    disk: takes over steps on shards that lie in files.
    """

    def __init__(
        self,
        module: nn.Module,
        index: Index,
        comm: Comm,
        *,
        ignored: Sequence[nn.Module],
        partition: Partition,
        disk: Disk | None = None,
    ) -> None:
        self._module, self._ignored, self._known = module, ignored, {*module.parameters()}
        self._index = index
        self._comm, self._refusal = comm, comm.channel("the refusal of parameters that were given other data")
        self._partition, self._stepping = partition, Stepping()
        self._overflow = Overflow(index.groups, comm)
        self._scaling = Scaling(comm, "clip_grad_norm_(max_norm) of the FSDP model")
        self._disk = disk
        self._known_optimizers: WeakSet[Optimizer] = WeakSet()
        _guards[:] = [known for known in _guards if known() is not None]
        _guards.append(ref(self))
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before_step))
            _registered.append(register_optimizer_step_post_hook(_after_step))

    @property
    def params(self) -> Iterable[nn.Parameter]:
        """Those of its units."""
        return self._index.keys()

    def dismiss(self) -> None:
        """Looks at no more steps."""
        _guards[:] = [known for known in _guards if known() is not self]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped these parameters."""
        return [*self._known_optimizers]

    def before_forward(self) -> None:
        """To be called before the model's forward. Raises RuntimeError as `refuse_moved` does."""
        self.refuse_moved()
        self._overflow.before_forward()

    def after_backward(self) -> None:
        """Collective. Backward is complete: gradients are as they should be."""
        self._overflow.spread()
        self._scaling.remember(self._index)

    @contextmanager
    def scaling_alike(self) -> Iterator[None]:
        """What is written into gradients in here scales them by one number that is the same on every rank."""
        with self._scaling.alike():
            yield

    def moved_problem(self) -> str | None:
        """Why parameters at rest cannot be used, in words for the user; None if they can.

        Costs 0.1 ms for 258 parameters.
        """
        return moved_problem([group for group in self._index.groups if not group.summoned])

    def refuse_moved(self) -> None:
        """To be called before a collective operation. Raises RuntimeError where parameters were given other data.

        Costs no communication where all is well. Ranks on which nothing is wrong raise it too, in their next operation.
        """
        problem = self.moved_problem()
        if problem is None:
            return
        try:
            self._comm.agree(self._refusal)
        except RuntimeError as error:  # others go on, and have now raised
            raise RuntimeError(problem) from error
        raise RuntimeError(problem)

    def _held(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [param for group in optimizer.param_groups for param in group["params"] if param in self._index]

    def know(self, optimizer: Optimizer) -> None:
        """From now on the optimizer's state is marked as of shards, and full state is cut where it loads some."""
        if optimizer not in self._known_optimizers:
            self._known_optimizers.add(optimizer)
            alone = not any(other._held(optimizer) for other in _alive() if other is not self)
            StateHooks(optimizer, self._index.groups, self._comm, alone=alone)

    def before_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Collective, if the optimizer holds any of these parameters. Returns what is to be its closure instead.

        Gradients that a closure makes are looked at after the closure.
        """
        params = self._held(optimizer)
        if not params:
            return closure
        self.know(optimizer)
        if closure is None:
            self._check(optimizer, params)
        self._stepping.before_step(optimizer)
        if self._disk is not None:
            self._disk.before_step(optimizer, params, closure=closure is not None)
        return None if closure is None else partial(self._checked, closure, optimizer, params)

    def _checked(self, closure: Callable[[], Any], optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Any:
        loss = closure()
        self._check(optimizer, params)
        return loss

    def _check(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Collective. Raises RuntimeError on every rank where a step would be wrong on any."""
        written = self._scaling.compare(self._problem(optimizer, params), self._stepping.written(optimizer))
        wrong = None if written is None else differs(written, optimizer)
        if wrong is not None:
            raise RuntimeError(wrong)
        for group in optimizer.param_groups:
            group.pop(SHARD_MARK, None)  # the mark of this rank's shard, which load_state_dict() has left here

    def after_step(self, optimizer: Optimizer) -> None:
        self._stepping.after_step(optimizer)
        if self._disk is not None:
            self._disk.stepped(optimizer, self._held(optimizer))

    def before_steps_in_backward(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError for state that does not belong to the optimizer's parameters."""
        self.know(optimizer)
        problem = self._loaded_from_another(optimizer)
        if problem is not None:
            raise RuntimeError(problem)

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Steps these parameters alone, past hooks."""
        if self._disk is None:
            step_alone(optimizer, params)
        else:
            self._disk.step(optimizer, params)
            self._disk.stepped(optimizer, params)

    def _problem(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> str | None:
        """Why the step cannot be taken, in words for the user; None if it can."""
        found = self._stepping.found(optimizer) if self._comm.world > 1 else {}
        for name, finding in found.items():
            problem = optimizer_problem(name, finding, self._partition, of="FSDP")
            if problem is not None and finding.kind is not Kind.TENSORWISE:
                return problem
        full = next((pair for pair in found.items() if pair[1].kind is Kind.TENSORWISE), None)
        problem = self.moved_problem() or self._newcomer() or self._loaded_from_another(optimizer)
        if problem is not None:
            return problem
        for unit in dict.fromkeys(map(self._index.unit_of, params)):
            if unit.state is TrainingState.IDLE and not unit.summoned:
                unit.reshard()  # a forward without a backward, such as an evaluation, may have left it full
                unit.settle()  # what an interrupted backward has gathered may still be read
            if unit.passed_by and all(param.grad is None for param in unit.params):
                return (
                    f"{unit.title} has no gradients: the last backward was asked for some in particular (inputs=..., "
                    "autograd.grad), and parameters that the model gave between forward and backward are shards, not "
                    "what it computed with. Call backward() without inputs, and freeze by requires_grad_(False) what "
                    "is not to be trained; or list the parameters before the forward."
                )
        for param in params:
            problem = self._problem_of(optimizer, param, full) if param.grad is not None else None
            if problem is not None:
                return problem
        return None

    def _loaded_from_another(self, optimizer: Optimizer) -> str | None:
        try:
            refuse_other_shards(SteppedShards(optimizer, self._index.groups, self._comm), optimizer.param_groups)
        except ValueError as error:
            return f"{type(optimizer).__name__} has loaded what does not belong to it: {error}"
        return None

    def _newcomer(self) -> str | None:
        for name, param in self._module.named_parameters():
            if param not in self._known and param.grad is not None:
                if any(param is one for module in self._ignored for one in module.parameters()):
                    continue
                return (
                    f"{name!r} is in no unit of FSDP: it was replaced (by load_state_dict with assign=True, say) or "
                    "added since the model was wrapped, and nobody averages its gradient. Change the model first, then "
                    "wrap it; what lies in ignored_modules may change, for you to average."
                )
        return None

    def _problem_of(self, optimizer: Optimizer, param: nn.Parameter, full: tuple[str, Finding] | None) -> str | None:
        """whole: the name of the optimizer that needs whole parameters, if one does, and why."""
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
        if cut and full is not None:
            return (
                f"{full[0]} needs each parameter whole, but {name!r} is cut between ranks: "
                f"{full[1].reason}. Wrap the model with FSDP(partition='whole')."
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


def guarded() -> set[nn.Parameter]:
    """The parameters of every FSDP that lives."""
    return {param for guard in _alive() for param in guard.params}


def moved_problem(groups: Iterable[ShardGroup]) -> str | None:
    """What is wrong where parameters no longer lie where these groups put them, in words for the user."""
    for group in groups:
        name = group.reclaim()
        if name is not None:
            return (
                f"{name!r} was moved, cast or given other data (`p.data = ...`) since FSDP put it where it is, and "
                "would lose it at the next gathering. Write in place: `p.data.copy_(...)`, or `p.copy_(...)` under "
                "torch.no_grad(). Move and cast the model before wrapping it."
            )
    return None


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args: with the optimizer itself first, as torch gives and takes them."""
    positional = len(args) > 1
    given = args[1] if positional else kwargs.get("closure")
    closure = given
    for guard in _alive():
        closure = guard.before_step(optimizer, closure)
    if closure is given:
        return args, kwargs
    return ((args[0], closure, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": closure})


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for guard in _alive():
        guard.after_step(optimizer)


def _alive() -> list[Guard]:
    return [guard for known in _guards if (guard := known()) is not None]


def _refuse_within_ddp(module: nn.Module, left_out: Collection[str]) -> str | None:
    sharded = guarded()
    for name, param in module.named_parameters() if sharded else ():
        if param in sharded and name not in left_out:
            return (
                f"DistributedDataParallel was put around {name!r}, of which FSDP keeps another shard on each rank. Use "
                "the model without DistributedDataParallel: FSDP averages gradients itself."
            )
    return None


refuse_within_ddp(_refuse_within_ddp)
