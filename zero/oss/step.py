"""The step of OSS, on every rank:

collect    this rank's slices of each param.grad, as views; with ShardedDDP the shards have gradients already
step       the inner optimizer steps this rank's shards
gather     every rank's shards reach all ranks in the flat buffers of the parameters
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zero._torch.autograd import in_a_backward
from zero._torch.optimizers import without_optimizer_hooks
from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors
from zero.comm.together import Together
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import NO_OPTIONS
from zero.shards import masters
from zero.shards.owned_shards import OwnedShards
from zero.shards.shard_group import MOVED, ShardGroup
from zero.state.optimizer_state import Led, follow, led
from zero.wrap import ddp
from zero.wrap.bucket import FullBucket
from zero.wrap.dtensor_checks import DTensorCheck
from zero.wrap.gradients import OWN_ONLY, OwnedGradient, WideAverage, refuse_sparse

# --------------------------------------------------------------------------------------------------------------- checks
#
# What is checked around the steps of OSS. Stage 3 has its own in zero/fsdp/step.py.


def _refuse_moved(shards: OwnedShards) -> None:
    """Raises if parameters no longer lie in their shard groups."""
    for group in shards.shard_groups:
        name = group.moved()
        if name is None:
            continue
        taken = shards.taken_by_another()
        if taken is not None:
            raise RuntimeError(
                f"{taken} was given to another OSS since, which shards and steps it now. Give each parameter to "
                "one OSS, drop the one that you do not step, and wrap again what zero.unwrap(model) returns."
            )
        raise RuntimeError(
            f"{name} was moved, cast or given other data after OSS was built, and would no longer be trained. "
            "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False); write "
            "others in place, `p.data.copy_(...)`."
        )


def _refuse_edited(param_groups: Sequence[dict[str, Any]], shards: OwnedShards) -> None:
    """Raises if the groups no longer hold the parameters that were laid out."""
    found, given = [group["params"] for group in param_groups], shards.given
    expected, counts = [len(params) for params in given], [len(params) for params in found]
    if counts == expected and all(
        # Not `params == own`, which compares the elements of tensors that are not the same object.
        all(map(operator.is_, params, own))
        for params, own in zip(found, given, strict=True)
    ):
        return
    kept = {param for params in found for param in params}
    named = (pair for flat in shards.shard_groups for pair in zip(flat.params, flat.names, strict=True))
    gone = next((name for param, name in named if param not in kept), None)
    raise RuntimeError(
        f"param_groups were edited: OSS was given groups of {expected} parameters, and finds groups of {counts}, "
        f"{f'without {gone}' if gone else 'not the same ones in the same order'}. Add a group by add_param_group; "
        "to step fewer parameters, freeze them by requires_grad_(False), or build OSS again."
    )


# ------------------------------------------------------------------------------------------------------------ gradients
#
# The gradients that one OSS steps: what stands in `param.grad` (zero/wrap/gradients.py), or this rank's slices.


class OwnedGradients:
    """`are_sharded`: whether ShardedDDP brings them, each to its owner. `filled_by`: by module what brings averages of
    full gradients into `param.grad`."""

    def __init__(self, shards: OwnedShards) -> None:
        self.are_sharded, self._shards = False, shards
        self.filled_by: WeakKeyDictionary[nn.Module, Sequence[FullBucket]] = WeakKeyDictionary()
        # Gradients of shards that were shown between steps, by parameter: others were assigned.
        self._shown: dict[nn.Parameter, Tensor | None] = {}

    def cleared(self) -> None:
        """The user has cleared all gradients."""
        self.drop_of_shards()
        for buckets in self.filled_by.values():
            for bucket in buckets:
                bucket.unreduced.clear()

    def wait_for_copies(self) -> None:
        """Makes the host wait for gradients that are on their way to it."""
        for group in self._shards.shard_groups:
            if group.copies:
                group.wait_for_copies()

    def refuse(self) -> None:
        """Raises RuntimeError for a gradient that cannot be stepped: that was not reduced, was assigned, or is another
        parameter's. The other ranks find the same, or wait for this one in vain."""
        for bucket in (bucket for buckets in self.filled_by.values() for bucket in buckets):
            for index in bucket.unreduced:
                if bucket.params[index].grad is not None:
                    raise RuntimeError(
                        f"{bucket.names[index]} has a gradient that was not averaged over the ranks: the "
                        "last backward ran under no_sync(), or failed. Run the last backward before step() outside "
                        "no_sync(), or call reduce(). To average gradients by hand build zero.OSS without zero.setup."
                    )
        groups = self._shards.shard_groups if self.are_sharded else ()
        for group, index in [(one, index) for one in groups for index in range(len(one.params))]:
            name, param = group.names[index], group.params[index]
            held, of_shard = param.grad, self._shards[param].grad
            if isinstance(held, OwnedGradient):
                held.refuse_of_others(group, index)
            if of_shard is not None and of_shard is not self._shown.get(param):
                raise RuntimeError(f"the shard of {name} was given a gradient that no backward has brought. {_BY_HAND}")
            if held is not None and (not isinstance(held, OwnedGradient) or held.unreduced is not None):
                raise RuntimeError(
                    f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went "
                    "around ShardedDDP, or the gradient was assigned. Run the last backward before step() outside "
                    f"no_sync(), or call reduce(). {OWN_ONLY} {_BY_HAND}"
                )

    def of_shard(self, param: nn.Parameter) -> Tensor | None:
        """What ShardedDDP has brought of a parameter's gradient to this rank."""
        return param.grad.shard if isinstance(param.grad, OwnedGradient) else None

    def show(self, param: nn.Parameter) -> None:
        """Gives the shard of a parameter its gradient, for whoever reads it between steps."""
        shard = self._shards[param]
        if self.are_sharded and shard.grad is self._shown.get(param):
            self._shown[param] = shard.grad = self.of_shard(param)

    def drop_of_shards(self) -> None:
        """Leaves shards without gradients: views would keep those of full parameters past model.zero_grad()."""
        self._shown.clear()
        for shard in self._shards.values():
            shard.grad = None

    def collect(self) -> bool:
        """Puts gradients where the inner optimizer finds them: this rank's slices of those of full parameters, views
        where their order in memory allows, with averages in place of what was rounded. Returns whether there are any
        (True if ShardedDDP brings them). Raises RuntimeError as `refuse`, and for a sparse one, whichever rank owns
        it, on all alike."""
        self.refuse()
        shards = self._shards
        for param, shard in shards.items():
            shard.grad = self.of_shard(param) if self.are_sharded else None
            if not self.are_sharded and param.grad is not None and shard in shards.empty:
                shard.grad = shard.data
        if self.are_sharded:
            return True
        for group in shards.shard_groups:
            for name, param in zip(group.names, group.params, strict=True):
                if param.grad is not None and param.grad.is_sparse:
                    refuse_sparse(name)
        for group in shards.shard_groups:
            for index in group.shapes.spans:
                param = group.params[index]
                full: Any = param.grad
                if full is not None:
                    with as_plain_tensors():
                        is_own = isinstance(full, WideAverage) and full.cut == group.cuts[index]
                        own = full.settled() if is_own else group.own_slice(index, full)
                    shards[param].grad = group.to_main(own)
        return any(param.grad is not None for param in shards)


_BY_HAND = "Gradients that no backward computes, as in evolution strategies, are for stage 1: OSS without ShardedDDP."


# ------------------------------------------------------------------------------------------------------------- the step


class Step:
    """The steps of one OSS. oss: it, with all that they need: its optimizer, shards, gradients and view of the state.
    writes_frozen: whether the optimizer may write into parameters without gradients.
    """

    def __init__(self, oss: Any, *, writes_frozen: bool) -> None:
        self._oss: Any = proxy(oss)  # it holds this, and is to be freed at once
        self._shards: OwnedShards = oss.shards
        self._inner, self._gradients = oss.optim, oss.gradients
        self._writes_frozen = writes_frozen
        self._gathered: list[str] = []  # the groups of the last step
        self._led: Led = {}
        self._steps_without = 0
        self._dtensors = DTensorCheck()
        self.together = Together([oss.comm], "the step of OSS")

    def run(self, closure: Callable[[], float] | None, given: dict[str, Any]) -> Any:
        """Collective, within `together`. One step. given: further arguments of the inner optimizer's step. Returns the
        closure's loss."""
        inner, loss = self._inner, None
        if in_a_backward():
            raise RuntimeError(
                "step() was called within a backward, from a hook: other gradients are not there yet, and none is "
                "averaged. Call it once backward() has returned."
            )
        if closure is not None and type(inner) not in ELEMENTWISE:
            self.refuse_changes()
            share_options(self._oss.param_groups, inner.param_groups)
            with without_optimizer_hooks():
                loss = inner.step(closure=self._for_inner(closure), **given)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                self.together.agree()  # before any rank steps: what it raises on one, all raise
            self.refuse_changes()
            self._collect()
            share_options(self._oss.param_groups, inner.param_groups)
            # So that gradients and stepped parameters of other groups are on their way while one is stepped.
            if self._shards.offload.active and type(inner) in ELEMENTWISE and not given:
                self._end(by_group=True)
                return loss
            self._shards.step(inner, **given)
        self._end()
        return loss

    def refuse_changes(self) -> None:
        """Raises RuntimeError if the optimizer or its parameters were changed. Call it in `together`."""
        _refuse_moved(self._shards)
        _refuse_edited(self._oss.param_groups, self._shards)
        self._dtensors.refuse(self._shards.places, self._inner, self._oss.finding)
        ddp.refuse_joined(self._shards)

    def _collect(self) -> None:
        """Collective where it fails. Puts gradients and parameters where the inner optimizer steps them."""
        found = self._gradients.collect()
        self._steps_without = 0 if found else self._steps_without + 1
        if self._steps_without == 2:  # one is normal: a first step for a scheduler, a skipped batch
            warn_user(f"In two steps one after another {ddp.NO_GRADIENT}")
        if not found:
            ddp.refuse_replaced(self._shards)
        elif not self._gradients.are_sharded and self._oss.comm.world > 1:
            ddp.refuse_unfrozen(self._shards)
        self._shards.refresh()
        self._oss.state_view.hide()
        self._led = led(self._inner, self._shards.empty)
        for shard in self._shards.empty.difference(self._led):
            shard.grad = None

    def _end(self, *, by_group: bool = False) -> None:
        """Collective. Copies the options back, and gathers the shards that the step may have changed. by_group: steps
        each group before its gather."""
        share_options(self._inner.param_groups, self._oss.param_groups)  # some optimizers write some
        if type(self._inner) not in ELEMENTWISE:  # torch's own write in place
            with torch.no_grad():
                self._shards.take_back(self._inner)
        self._oss.full_state = None
        try:
            groups = self._stepped_groups()
            self._gather(groups, by_group=by_group)
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

    def _stepped_groups(self) -> Sequence[ShardGroup]:
        """Those that a step may have changed, in the order in which gradients arrive."""
        return self._shards.shard_groups if self._writes_frozen else self._shards.trained_groups()

    def _gather(self, groups: Sequence[ShardGroup], *, by_group: bool = False) -> None:
        """Collective. Gathers every rank's shards of these groups on every rank. by_group: steps each before, which is
        offloaded.

        Raises ValueError on every rank if ranks have stepped other groups: one alone has frozen or unfrozen parameters,
        or given gradients to some."""
        labels = [group.label for group in groups]
        if self.together.agree(int(labels != self._gathered)):  # on any rank
            self._oss.comm.compare("the parameters that a step changes", labels)
            self._gathered = labels
        for group in groups:
            apart = group.main is not group.shard
            if by_group:
                write = partial(masters.write_part, group) if apart else None
                self._shards.step_group(self._inner, group, then=write)
                if apart:
                    masters.written(group)
            elif apart:
                masters.write(group)
            group.launch_unshard()
        for group in groups:
            group.finish_unshard()
        self._shards.note_versions()

    def gather_written(self, params: Collection[nn.Parameter]) -> None:
        """Collective. Gathers the groups that hold these parameters, into whose shards was written between steps."""
        with self.together:
            groups = [group for group in self._shards.shard_groups if any(param in params for param in group.params)]
            self._gather(groups)
            increment_version([param for group in groups for param in group.params])

    def _for_inner(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Wraps the closure for an optimizer that calls it within its step, once or more."""
        called = False

        def evaluate() -> float:
            nonlocal called
            if called:  # the optimizer may have changed its shards since
                name = self._shards.given_other_data()
                if name is not None:  # what it keeps of the data before would be overwritten
                    raise RuntimeError(MOVED.format(name))
                self._gather(self._stepped_groups())
            called = True
            with torch.enable_grad():
                loss = closure()
            self.together.agree()
            self.refuse_changes()
            self._collect()
            self._gradients.wait_for_copies()
            return loss

        return evaluate

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective. Calls a method of the inner optimizer that writes into shards, and gathers these."""
        with self.together:
            self.refuse_changes()
            self._shards.refresh()
            self._oss.state_view.hide()
            result = method(*args, **kwargs)
            share_options(self._inner.param_groups, self._oss.param_groups)
            self._gather(self._shards.shard_groups)
            return result


def share_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies options between outer groups, which schedulers write, and inner ones, which some optimizers write."""
    for of, to in zip(source, target, strict=True):
        to.update((key, value) for key, value in of.items() if key not in NO_OPTIONS)
