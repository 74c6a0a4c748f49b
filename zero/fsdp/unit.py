"""One wrapped module's parameters and gradients, and when they are whole.

At rest a unit's parameters are parts, and `param.grad` is this rank's part of the averaged gradient, in the part's
shape: any optimizer steps parts as it would step parameters. While the module computes, parameters are whole. In its
backward `param.grad` is autograd's own whole gradient; what was in it before waits in `_resting`. What is computed from
parameters at rest has gradients of parts, which autograd adds to what is in `param.grad` then.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from zero.comm import Comm
from zero.fsdp.precision import MixedPrecision
from zero.oss.flat import FlatGroup, Residence
from zero.sdp.bucket import Deliver, GradBucket, Phase


class Stage(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    BACKWARD = "in backward"


class Call:
    """One forward of a unit.

    begun, ended: its place among all forwards of units: how many had begun when it had, and when it ended.
    seen_off: whether a hook tells when its backward is complete; else it is at the end of that backward.
    waited_for: the unit's round in which its backward was last expected; -1 once that is complete.
    shares_casts: whether it may compute with what autocast has cast in an earlier one.
    """

    ended: float = math.inf
    seen_off = True
    waited_for = -1

    def __init__(self, begun: int, *, shares_casts: bool) -> None:
        self.begun, self.shares_casts = begun, shares_casts


class Unit:
    """The parameters that are gathered together for one module.

    stays: whether they stay whole from forward to backward.
    `params`: all that are in the groups.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: list[FlatGroup],
        *,
        precision: MixedPrecision,
        stays: bool,
        replicas: Comm | None = None,
    ) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.params = {param for group in groups for param in group.params}
        self.precision, self.stays = precision, stays
        self.stage = Stage.IDLE
        self.entrance: nn.Module | None = None
        """The module by which the running forward came in, if not the unit's own."""
        self.running: list[Call] = []
        """Forwards that are running: more than one where a module calls itself."""
        self.calls = 0
        """Forwards whose backward is expected or under way."""
        self.earliest: float = math.inf
        """When the first of them began."""
        self._shares_casts = False
        self._round = 0
        """Goes up when all of these are forgotten, as a backward ends."""
        self.inputs: set[Node] = set()
        """What made the inputs of the running forwards."""
        self.reads: list[Unit] = []
        """Other units whose parameters the module reads."""
        self.readers = 0
        """Forwards of others that are running and read parameters of this unit."""
        self.is_read = False
        """Whether others read its parameters, so that its gradients are complete at the end of backward only."""
        self.before: Unit | None = None
        self.after: Unit | None = None
        """The units that ran before and after it in the last forward."""
        self.kept = False
        """Whether a backward under no_sync came here since the last that was not."""
        self.buckets = [GradBucket(group, sent_as=precision.reduce_dtype, replicas=replicas) for group in groups]
        self.deliveries: list[tuple[GradBucket, Deliver]] = [
            (bucket, partial(self._deliver, bucket.flat)) for bucket in self.buckets
        ]
        self._entitle()
        self._resting: dict[nn.Parameter, Tensor] = {}
        self._unreduced: dict[nn.Parameter, Tensor] = {}
        self._shows_resting: set[nn.Parameter] = set()
        """Parameters with an unreduced gradient whose `grad` is what rests, not their share of that."""
        self._sends = False
        """Whether gradients are on their way, or due."""
        self.passed_by = False
        """Whether the last backward that came here was asked for gradients in particular, of which these were none."""

    def _entitle(self) -> None:
        self.title = f"unit {self.name!r}" if self.name else "the root unit"

    def move_below(self, prefix: str) -> None:
        """From now on its module is known by its name in a larger model, where it lies below `prefix`."""
        self.name = f"{prefix}.{self.name}".rstrip(".")
        self._entitle()
        for group in self.groups:
            group.rename([f"{prefix}.{name}" for name in group.names], self.title)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.stage.value}, {self.groups})"

    @property
    def depth(self) -> int:
        """How many of its forwards are running."""
        return len(self.running)

    def expects(self, call: Call) -> bool:
        """Whether the backward of the call is to come, or under way."""
        return call.waited_for == self._round

    def expect(self, call: Call) -> None:
        """The backward of the call is to come, or has come."""
        if not self.expects(call):
            call.waited_for = self._round
            self.calls += 1
            self.earliest = min(self.earliest, call.begun)
            self._shares_casts |= call.shares_casts

    def leave(self, call: Call) -> bool:
        """The backward of the call is complete. Returns whether it was expected."""
        expected = self.expects(call)
        if expected:
            call.waited_for = -1
            self.calls -= 1
        return expected

    @property
    def ends_last(self) -> bool:
        """Whether its gradients are complete only when all of backward is."""
        return self.is_read or self._shares_casts

    def forget_calls(self) -> None:
        self.calls = 0
        self._shares_casts = False
        self.earliest = math.inf
        self._round += 1

    def leave_forward(self) -> None:
        """Forgets forwards that an exception ended."""
        self.readers = 0
        self.running.clear()
        self.entrance = None
        self.inputs.clear()

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def whole(self) -> bool:
        return all(group.residence is Residence.WHOLE for group in self.groups)

    @property
    def summoned(self) -> bool:
        """Whether the parameters are whole because the user asked for it."""
        return any(group.summoned for group in self.groups)

    @property
    def gathering(self) -> bool:
        return any(group.gathering for group in self.groups)

    def launch_unshard(self) -> None:
        """Collective. Starts to make the parameters whole, where they are not."""
        for group in self.groups:
            if group.residence is Residence.PART:
                group.launch_gather()

    def finish_unshard(self) -> None:
        """Waits until the parameters are whole."""
        for group in self.groups:
            if group.gathering:
                group.finish_gather()

    def refuse_incomplete(self) -> None:
        """Raises RuntimeError where parameters have not arrived, because an earlier gather failed."""
        for group in self.groups:
            if group.incomplete:
                raise RuntimeError(
                    f"the parameters of {self.title} of FSDP have not arrived: gathering them failed before. Look for "
                    "the first error, and start the process group anew."
                )

    def reshard(self) -> None:
        """Leaves of the parameters this rank's part."""
        self.finish_unshard()
        for group in self.groups:
            if group.residence is Residence.WHOLE and not group.summoned:
                group.release()

    def look_for_writes(self) -> None:
        """Has the next `reshard` look whether the module wrote into its parameters, if it was whole till then."""
        for group in self.groups:
            group.look_for_writes()

    # ------------------------------------------------------------------------------------------- gradients

    def _trained(self) -> Iterator[tuple[GradBucket, int, nn.Parameter]]:
        for bucket in self.buckets:
            for index in bucket.trained:
                yield bucket, index, bucket.flat.params[index]

    def enter_backward(self) -> None:
        """From here on autograd may write whole gradients; the parameters are whole, and nothing is on its way."""
        assert all(bucket.phase is Phase.FILLING for bucket in self.buckets)
        self.stage = Stage.BACKWARD
        self.passed_by = False
        for bucket in self.buckets:
            bucket.notice_trained()
        for _, _, param in self._trained():
            param.grad = self._put_by(param)

    def _put_by(self, param: nn.Parameter) -> Tensor | None:
        """Puts the gradient of the part by, until this backward's joins it; returns the whole one that no_sync kept.

        What zero_grad has cleared since is cleared here too.
        """
        shown, param.grad = param.grad, None
        unreduced = self._unreduced.pop(param, None)
        if shown is None:
            self._resting.pop(param, None)
        elif unreduced is None or param in self._shows_resting:
            self._resting[param] = shown
        self._shows_resting.discard(param)
        return None if shown is None else unreduced

    def end_backward(self) -> None:
        """Hands the gradients to the buckets, for `launch_reduce` to send, and leaves of the parameters the parts."""
        for bucket, index, param in self._trained():
            bucket.take_from(param, index)
        self._sends = True
        self.kept = False
        self._leave_backward()

    def take_leftovers(self) -> None:
        """Hands to the buckets what backwards under no_sync kept here, after a backward that did not come here."""
        for bucket, index, param in self._trained():
            unreduced = self._put_by(param)
            if unreduced is not None:
                bucket.take(index, unreduced)
        self._sends = True
        self.kept = False

    def launch_reduce(self) -> None:
        """Collective. Sends the gradients that the buckets have to their owners."""
        for bucket in self.buckets:
            if bucket.trained:
                bucket.launch()

    def finish_reduce(self) -> None:
        """Waits for this rank's part of the gradients, and adds it to what was there before."""
        for bucket, index, param in self._trained():
            if param.grad is not None:  # which autograd lets pass where a part has the shape of the whole
                raise RuntimeError(
                    f"{bucket.flat.names[index]} got a gradient after {self.title} of FSDP had sent its gradients, in "
                    "one backward, and not through what the unit's forward returned. Compute with parameters inside of "
                    "forward, and return what comes of it."
                )
        for bucket, deliver in self.deliveries:
            if bucket.phase is Phase.REDUCING:
                bucket.finish(deliver)
        self._sends = False

    def _deliver(self, flat: FlatGroup, index: int, gradient: Tensor | None) -> None:
        param = flat.params[index]
        resting = self._resting.pop(param, param.grad)
        if gradient is not None:
            gradient = flat.bring_home(gradient)
        if resting is not None and gradient is not None:
            flat.settle()
            gradient = resting.add_(gradient)
        param.grad = resting if gradient is None else gradient

    @property
    def at_rest(self) -> bool:
        """Whether `param.grad` is the part's, with nothing on its way to it."""
        return self.stage is Stage.IDLE and not (self._sends or self.whole or self.gathering)

    def take_resting(self, param: nn.Parameter, name: str) -> None:
        """Autograd is about to add a gradient of the part to `param.grad`.

        Where that shows a share of what no_sync kept, it gets what rests instead. Raises RuntimeError within the
        backward of the unit, where it is the whole's.
        """
        if not self.at_rest:
            raise RuntimeError(
                f"{name} got a gradient of this rank's part within the backward of {self.title} of FSDP: something, "
                "such as a penalty, was computed from it before the forward of the model. Compute it after: "
                "loss = criterion(model(inputs), targets) + penalty."
            )
        if param.grad is None:  # cleared
            self._unreduced.pop(param, None)
            self._resting.pop(param, None)
        elif param in self._unreduced and param not in self._shows_resting:
            param.grad = self._resting.pop(param, None)
            self._shows_resting.add(param)

    def settle(self) -> None:
        """Waits until the parts and their gradients are the host's to read and write."""
        for group in self.groups:
            group.settle()

    def keep_gradients(self) -> None:
        """Ends a backward under no_sync: whole gradients stay here; `param.grad` shows this rank's share of them."""
        kept = {
            param: (bucket, index, param.grad) for bucket, index, param in self._trained() if param.grad is not None
        }
        for param in kept:
            param.grad = None
        self._leave_backward()
        self.kept = True
        for param in self._resting.keys() - kept.keys():  # to which this backward did not come
            param.grad = self._resting.pop(param)
        for param, (bucket, index, gradient) in kept.items():
            flat = bucket.flat
            ordered = flat.in_memory_order(index, gradient)
            span = flat.spans.get(index)
            share = (ordered[span.start : span.stop] if span else ordered[:0]).to(flat.part)
            param.grad = flat.shaped(index, share, span) if span else share.view(flat.part_views[index].shape)
            self._unreduced[param] = gradient

    def unreduced(self, param: nn.Parameter) -> bool:
        """Whether a gradient of the parameter waits here that no_sync kept from its owners."""
        return param in self._unreduced

    def _leave_backward(self) -> None:
        self.stage = Stage.IDLE
        self.forget_calls()
        self.reshard()

    def interrupt(self) -> None:
        """Puts the gradients from before a backward that an exception ended where they were. Waits for nobody.

        Where that backward has not come they are there, and what no_sync kept is kept.
        """
        if self.stage is Stage.BACKWARD:
            for _, _, param in self._trained():
                param.grad = None
            self.kept = False
            self._leave_backward()
        resting = self._resting.keys() - self._unreduced.keys()
        if resting and not self.gathering:
            self.reshard()
            for param in resting:
                param.grad = self._resting.pop(param)

    def abandon(self) -> None:
        """Forgets a forward or backward that an exception ended."""
        self._sends = False
        for bucket in self.buckets:
            bucket.abandon()
        self.leave_forward()
        self.finish_unshard()
        self.interrupt()
        self._leave_backward()
