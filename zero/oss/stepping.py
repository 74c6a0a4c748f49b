"""The step of OSS, on every rank:

take gradients   this rank's slices of each param.grad, as views; with ShardedDDP the shards have gradients already
step             the inner optimizer steps this rank's shards
all-gather       every rank's shards reach all ranks in the flat buffers of the parameters; waited for in the step, or
                 where the next forward reads them (ShardedDDP)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero._torch import SteppedByScaler
from zero.checks.numbers import Agreed
from zero.checks.scaling import Scaling
from zero.checks.step_checks import StepChecks
from zero.comm import Comm, Wire
from zero.comm.wire import PLAIN
from zero.features.step_in_backward.optimizer import InBackward, problem_of, refuse
from zero.interop.ddp import evaluated
from zero.interop.torch_checkpoint import asked_by_torch_checkpoint
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import options
from zero.oss.gradients import refuse_unreduced, shares, take_gradients
from zero.oss.joining import NO_JOIN, Joining
from zero.oss.sharded_optimizer import ShardedOptimizer
from zero.oss.shown_gradients import ShownGradients
from zero.shards import norm
from zero.shards.shard_group import ShardGroup

_COMPRESSED_AT_ONCE = 2
"""Shard groups whose compressed copies exist at a time."""


class Stepping(ShardedOptimizer, Joinable, SteppedByScaler):
    """The step of OSS.

    agreed: compares the numbers that the optimizer writes into its groups, if it may write any.
    writes_frozen: whether the optimizer may write into parameters without gradients.
    """

    _wire: Wire

    def __init__(self, groups: list[dict[str, Any]], agreed: Agreed | None, *, writes_frozen: bool) -> None:
        self._agreed, self._writes_frozen = agreed, writes_frozen
        self.gradients_arrive_sharded = False
        self.shown_gradients = ShownGradients(self.part)
        """What `param.grad` shows after a backward of ShardedDDP."""
        self._leaves_gathers = False
        self._in_backward: InBackward | None = None
        self._checks = StepChecks(self._comm)
        self._scaling = Scaling(self._comm, "clip_grad_norm(max_norm) of the optimizer")
        self._step_channel = self._comm.channel("the step of OSS")
        self._failed_channel = self._comm.channel("a step of OSS in which its optimizer raised an error")
        self._joining = Joining(self._comm)
        Joinable.__init__(self)
        super().__init__(groups)

    def expect_sharded_gradients(self) -> None:
        """From now on ShardedDDP sets the gradients of shards; steps no longer take them from `param.grad`."""
        self.gradients_arrive_sharded = True

    def leave_gathers(self) -> None:
        """From now on `step` leaves its all-gathers in flight if transfers overlap with computing (not over Gloo).

        Until `finish_gathers` the parameters are NaN.
        """
        self._leaves_gathers = True

    def finish_gathers(self, groups: Sequence[ShardGroup] | None = None) -> None:
        """Waits for all-gathers that a step left in flight, of these shard groups or of all.

        Raises RuntimeError if parameters were moved or replaced since the step.
        """
        gathering = [group for group in self.shard_groups if group.gathering and (groups is None or group in groups)]
        self._checks.refuse_moved(gathering)
        for group in gathering:
            group.finish_unshard()

    @overload
    def step(self, closure: None = None, **options: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **options: Any) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Collective. Steps this rank's shards and gathers all ranks' shards. Returns the closure's loss.

        The closure is called before the step of torch's own optimizers. Other optimizers get it; each time that they
        call it, parameters are gathered first. options: further arguments of the inner optimizer's step.

        Raises RuntimeError if parameters were moved or replaced, or if no_sync left gradients unreduced; and on every
        rank if param_groups were edited on any, if the optimizer raised on any or wrote different numbers into its
        groups, if ranks do different things, or inside of `ddp.join()`.
        """
        if self._in_backward is not None:
            return self._end_stepped(self._in_backward, closure, options)
        by_inner = closure is not None and type(self.optim) not in ELEMENTWISE
        if by_inner and self._joining.within(self):
            raise RuntimeError(
                f"{type(self.optim).__name__} may call its closure several times in a step, which ranks that have no "
                "data left in this Join cannot follow. Call step() without a closure, after backward."
            )
        self._joining.before_step(self, self._shards)
        loss: Any = None
        if closure is not None and by_inner:
            self._refuse_changes()
            self._hand_options()
            loss = self.optim.step(closure=self._for_inner(closure), **options)
        else:
            if closure is not None:
                loss = evaluated(closure, self._shards, self._comm)
            self._begin_step()
            with self._raised_everywhere():
                self._shards.step(self.optim, **options)
        self._end_step()
        return cast("float | None", loss)

    def _begin_step(self, *, joined: bool = False) -> None:
        """Collective. Prepares the inner optimizer's step: checks, gradients, master weights, options.

        joined: this rank has no data left, and gets the gradients of other ranks.
        """
        self._refuse_changes()
        self.shown_gradients.drop_cleared()
        if self.gradients_arrive_sharded:
            self._checks.refuse_wrapped(self, self.optim)
        if not joined:
            self._checks.refuse_replaced(self._shards, found_gradients=self._take_gradients())
        if self._joining.within(self):
            self._joining.share_gradients(self._shards, self.param_groups, joined=joined)
        self._shards.masters.refresh()
        self._hand_options()

    def _hand_options(self) -> None:
        """Copies the options to the inner optimizer, which may write numbers into its groups from here on."""
        self._share_options(self.param_groups, self.optim.param_groups)
        if self._agreed is not None:
            self._agreed.before_step(self.optim)

    @contextmanager
    def _raised_everywhere(self) -> Iterator[None]:
        """A context whose errors raise on the other ranks, too, which would wait for this one."""
        try:
            yield
        except Exception:
            with suppress(RuntimeError):
                self._comm.agree(self._failed_channel)
            raise

    def _end_step(self) -> None:
        """Collective. Gathers the stepped shards, and copies the options back."""
        if self._agreed is not None:
            self._agreed.after_step(self.optim)
        if not self.gradients_arrive_sharded:  # views would keep full gradients alive past model.zero_grad()
            self._shards.drop_gradients()
        self._share_options(self.optim.param_groups, self.param_groups)
        self.forget_full_state()
        self._gather(self._stepped_groups())

    # --------------------------------------------------------------------------------------------- in backward

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
        """Called before a backward that reduces gradients to their owners."""
        if self._in_backward is not None:
            self._in_backward.begin()
            with torch.no_grad():
                self._refuse_changes()
                self._shards.masters.refresh()
                self._hand_options()

    def gradients_arrived(self, group: ShardGroup) -> None:
        """Called when the gradients of a group are reduced, except of parameters that not all ranks used."""
        if self._in_backward is not None:
            self._in_backward.step_begins()
            with torch.no_grad():
                self._shards.step_group(self.optim, group)
            self._shards.drop_gradients([group])
            increment_version([*group.params])  # so that autograd refuses tensors that it saved of them

    def backward_ends(self) -> None:
        """Called when all gradients are reduced."""
        self.arrive()
        if self._in_backward is not None:
            for group in self.shard_groups:
                if any(self.part(param).grad is not None for param in group.params):
                    self.gradients_arrived(group)
            self._in_backward.end()

    def _end_stepped(
        self, in_backward: InBackward, closure: Callable[[], float] | None, options: dict[str, Any]
    ) -> float | None:
        """Collective. Gathers the shards that were stepped in backward."""
        if options:
            refuse(f"an argument of step ({', '.join(options)})", "Leave it out.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if in_backward.stepped:
            self._refuse_changes()
            self._end_step()
            in_backward.stepped = False
        return loss

    # -------------------------------------------------------------------------------------------------- gathers

    def _stepped_groups(self) -> list[ShardGroup]:
        """The shard groups that a step may have changed, in the order in which forward reads them."""
        return self.shard_groups[::-1] if self._writes_frozen else self._shards.trained_groups()

    def _refuse_changes(self) -> None:
        self._checks.refuse_moved_anywhere(self.shard_groups)
        self.finish_gathers()
        self._checks.refuse_edits(self._shards, self.param_groups)

    def _for_inner(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Wraps the closure for an optimizer that calls it within its step, once or more."""
        called = False

        def evaluate() -> float:
            nonlocal called
            if called:  # the optimizer may have changed its shards since
                self._gather(self._stepped_groups())
                self.finish_gathers()
            called = True
            loss: float = evaluated(closure, self._shards, self._comm)
            self._refuse_changes()
            self._checks.refuse_replaced(self._shards, found_gradients=self._take_gradients())
            self.arrive()
            self._shards.masters.refresh()
            return loss

        return evaluate

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """See torch.optim.Optimizer. With ShardedDDP the hook is called with the inner optimizer, whose `param_groups`
        hold this rank's shards with their gradients: `param.grad` is None.

        The step raises RuntimeError on every rank if a hook scaled gradients differently on different ranks.
        """
        if self._in_backward is not None:
            refuse("a hook before the step", "Register it on the parameters, or step after backward.")

        def with_gradients(_: Optimizer, args: Any, kwargs: Any) -> Any:
            if not self.gradients_arrive_sharded:
                return hook(self, args, kwargs)
            self._scaling.remember(self._shards.values())
            result = hook(self.optim, args, kwargs)
            self._scaling.compare(None)
            return result

        return super().register_step_pre_hook(with_gradients)

    def _gather(self, groups: Sequence[ShardGroup]) -> None:
        """Collective. Gathers every rank's shards of these groups on every rank."""
        self._comm.agree(self._step_channel)
        in_flight: list[ShardGroup] = []
        for group in groups:
            if self._wire is not PLAIN and len(in_flight) == _COMPRESSED_AT_ONCE:
                in_flight.pop(0).finish_unshard()
            self._shards.masters.write([group])
            group.launch_unshard(wire=self._wire, conceal=self._is_left(group))
            in_flight.append(group)
        for group in in_flight:
            if not self._is_left(group):
                group.finish_unshard()

    def _is_left(self, group: ShardGroup) -> bool:
        return self._leaves_gathers and group.overlaps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of this rank's shards."""
        super().zero_grad(set_to_none)
        self.optim.zero_grad(set_to_none)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. Scales all gradients so that their norm, as one vector, is at most max_norm.

        Returns the norm before, 0-dim, the same on every rank. norm_type: 1, 2, any p > 0, or inf.
        """
        total = self.grad_norm(norm_type)
        full = [param.grad for param in self._shards if param.grad is not None]
        norm.clip(self._shards.gradients() if self.gradients_arrive_sharded else full, total, float(max_norm))
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Collective. Returns the norm of all gradients, as one vector, 0-dim, the same on every rank.

        Call it between backward and step. norm_type: as of `clip_grad_norm`.
        """
        if self._in_backward is not None:
            refuse("the norm of all gradients", "Step after backward, or clip values in hooks.")
        device = self.shard_groups[0].full.device
        dtypes = {shard.dtype for shard in self._shards.values()}
        if self.gradients_arrive_sharded:
            self.shown_gradients.drop_cleared()
            refuse_unreduced(self.shard_groups)
            return norm.total_norm(self._shards.gradients(), self._comm, float(norm_type), device, dtypes)
        if self._joining.within(self):  # ranks that have joined do not call this
            full = [param.grad for param in self._shards if param.grad is not None]
            return norm.total_norm(full, Comm.alone(), float(norm_type), device, dtypes)
        return norm.total_norm(shares(self.shard_groups), self._comm, float(norm_type), device, dtypes)

    def scaler_steps(self) -> None:
        """Raises RuntimeError inside of torch's Join."""
        self._joining.refuse_scaler(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """torch's Join calls it on every rank. Raises RuntimeError at stage 2."""
        if self.gradients_arrive_sharded:
            raise RuntimeError(NO_JOIN.format("an OSS of ShardedDDP"))
        return self._joining.enter(self._step_joined, self._shards)

    @torch.no_grad()
    def _step_joined(self) -> None:
        self._begin_step(joined=True)
        with self._raised_everywhere():
            self._shards.step(self.optim)
        self._end_step()

    def _take_gradients(self) -> bool:
        """Returns whether any parameter has a gradient; True if ShardedDDP sets the gradients of shards."""
        if self.gradients_arrive_sharded and not asked_by_torch_checkpoint():  # which steps with gradients of zero
            refuse_unreduced(self.shard_groups)
            return True
        return take_gradients(self.shard_groups, self._shards, self.bring)

    def _share_options(self, source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        """Copies options between outer groups, which schedulers write, and inner ones, which some optimizers write."""
        for of, to in zip(source, target, strict=True):
            to.update(options(of))
