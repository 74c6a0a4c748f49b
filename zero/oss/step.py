"""The step of OSS, on every rank:

collect    this rank's slices of each param.grad, as views; with ShardedDDP the shards have gradients already
step       the inner optimizer steps this rank's shards
gather     every rank's shards reach all ranks in the flat buffers of the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zero._torch.autograd import in_a_backward
from zero._torch.optimizers import without_optimizer_hooks
from zero.comm import Comm
from zero.comm.together import Together
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import NO_OPTIONS
from zero.oss.checks import StepChecks
from zero.oss.gradients import OwnedGradients
from zero.oss.state_dicts import StateDicts
from zero.oss.state_view import StateView
from zero.shards import masters
from zero.shards.bound import MOVED
from zero.shards.owned_shards import OwnedShards
from zero.shards.shard_group import ShardGroup
from zero.state.empty import Led, follow, led

_WITHIN_BACKWARD = (
    "step() was called within a backward, from a hook: other gradients are not there yet, and none is averaged. Call "
    "it once backward() has returned."
)


class Step:
    """The steps of one OSS.

    inner: the optimizer of the shards. checks: what is checked around steps.
    writes_frozen: whether the optimizer may write into parameters without gradients.

    outer: the OSS, into whose groups schedulers write. It is an argument: OSS holds this, and is to be freed at once.
    """

    def __init__(
        self,
        comm: Comm,
        inner: Optimizer,
        shards: OwnedShards,
        gradients: OwnedGradients,
        state_view: StateView,
        state_dicts: StateDicts,
        checks: StepChecks,
        *,
        writes_frozen: bool,
    ) -> None:
        self._comm, self._inner, self._shards, self._gradients = comm, inner, shards, gradients
        self._state_view, self._state_dicts, self._checks = state_view, state_dicts, checks
        self._writes_frozen = writes_frozen
        self._gathered: list[str] = []  # the groups of the last step
        self._led: Led = {}
        self.together = Together([comm], "the step of OSS")

    def _stepped_groups(self) -> Sequence[ShardGroup]:
        """Those that a step may have changed, in the order in which gradients arrive."""
        return self._shards.shard_groups if self._writes_frozen else self._shards.trained_groups()

    def run(self, outer: Optimizer, closure: Callable[[], float] | None, given: dict[str, Any]) -> Any:
        """Collective, within `together`. One step. given: further arguments of the inner optimizer's step. Returns the
        closure's loss."""
        inner, loss = self._inner, None
        if in_a_backward():
            raise RuntimeError(_WITHIN_BACKWARD)
        if closure is not None and type(inner) not in ELEMENTWISE:
            self.refuse_changes(outer)
            self._hand_options(outer)
            with without_optimizer_hooks():
                loss = inner.step(closure=self._for_inner(outer, closure), **given)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                self.together.agree()  # before any rank steps: what it raises on one, all raise
            self.refuse_changes(outer)
            self.collect(outer)
            self._hand_options(outer)
            if self._shards.steps_by_group(inner, given):
                self.end(outer, by_group=True)
                return loss
            self._shards.step(inner, **given)
        self.end(outer)
        return loss

    def collect(self, outer: Optimizer) -> None:
        """Collective where it fails. Puts gradients and parameters where the inner optimizer steps them."""
        found = self._gradients.collect()
        self._checks.refuse_gradients(found=found, are_sharded=self._gradients.are_sharded)
        self._shards.refresh()
        self._state_view.hide()
        self._led = led(self._inner, self._shards.empty)
        for shard in self._shards.empty.difference(self._led):
            shard.grad = None

    def end(self, outer: Optimizer, *, by_group: bool = False) -> None:
        """Collective. Copies the options back, and gathers the shards that the step may have changed. by_group: steps
        each group before its gather."""
        self.return_options(outer)
        if type(self._inner) not in ELEMENTWISE:  # torch's own write in place
            with torch.no_grad():
                self._shards.take_back(self._inner)
        self._state_dicts.forget()
        try:
            groups = self._stepped_groups()
            self.gather(groups, by_group=by_group)
            # Graphs that saved a parameter before the step cannot be used any more, as if it was stepped itself.
            stepped = [param for group in groups for param in group.params if param.grad is not None]
            increment_version(stepped)
            if type(self._inner) not in ELEMENTWISE:  # others are not given gradients of empty shards
                for param in stepped:
                    self._inner.state.setdefault(self._shards[param], {})
        finally:
            self._shards.after_step(self._inner)
        follow(self._inner, self._led)
        self._gradients.drop_of_shards()

    def gather(self, groups: Sequence[ShardGroup], *, by_group: bool = False) -> None:
        """Collective. Gathers every rank's shards of these groups on every rank. by_group: steps each before.

        Raises ValueError on every rank if ranks have stepped other groups: one alone has frozen or unfrozen parameters,
        or given gradients to some."""
        labels = [group.label for group in groups]
        if self.together.agree(int(labels != self._gathered)):  # on any rank
            self._comm.compare("the parameters that a step changes", labels)
            self._gathered = labels
        for group in groups:
            if by_group:
                self._step_group(group)
            elif group.main is not group.shard:
                masters.write(group)
            group.launch_unshard()
        for group in groups:
            group.finish_unshard()
        self._shards.note_versions()

    def gather_written(self, params: Collection[nn.Parameter]) -> None:
        """Collective. Gathers the groups that hold these parameters, into whose shards was written between steps."""
        with self.together:
            groups = [group for group in self._shards.shard_groups if any(param in params for param in group.params)]
            self.gather(groups)
            increment_version([param for group in groups for param in group.params])

    def _step_group(self, group: ShardGroup) -> None:
        """Steps the shards of one group, which are offloaded."""
        write = partial(masters.write_part, group) if group.main is not group.shard else None
        self._shards.step_group(self._inner, group, then=write)
        if write is not None:
            masters.written(group)

    # --------------------------------------------------------------------------------------------------- checks

    def refuse_changes(self, outer: Optimizer) -> None:
        """Raises RuntimeError if the optimizer or its parameters were changed. Call it in `together`."""
        self._checks.refuse_changes(outer.param_groups)

    # ------------------------------------------------------------------------------------------- options

    def _hand_options(self, outer: Optimizer) -> None:
        """Copies the options to the inner optimizer."""
        share_options(outer.param_groups, self._inner.param_groups)

    def return_options(self, outer: Optimizer) -> None:
        """Copies the options back, of which some optimizers write some."""
        share_options(self._inner.param_groups, outer.param_groups)

    # --------------------------------------------------------------------------------------------------- closures

    def _for_inner(self, outer: Optimizer, closure: Callable[[], float]) -> Callable[[], float]:
        """Wraps the closure for an optimizer that calls it within its step, once or more."""
        called = False

        def evaluate() -> float:
            nonlocal called
            if called:  # the optimizer may have changed its shards since
                name = self._shards.given_other_data()
                if name is not None:  # what it keeps of the data before would be overwritten
                    raise RuntimeError(MOVED.format(name))
                self.gather(self._stepped_groups())
            called = True
            with torch.enable_grad():
                loss = closure()
            self.together.agree()
            self.refuse_changes(outer)
            self.collect(outer)
            self._gradients.wait_for_copies()
            return loss

        return evaluate

    def call(self, outer: Optimizer, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective. Calls a method of the inner optimizer that writes into shards, and gathers these."""
        with self.together:
            self.refuse_changes(outer)
            self._shards.refresh()
            self._state_view.hide()
            result = method(*args, **kwargs)
            self.return_options(outer)
            self.gather(self._shards.shard_groups)
            return result


def share_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies options between outer groups, which schedulers write, and inner ones, which some optimizers write."""
    for of, to in zip(source, target, strict=True):
        to.update((key, value) for key, value in of.items() if key not in NO_OPTIONS)
