"""One wrapped module's parameters and gradients, and when they are whole.

At rest a unit's parameters are parts, and `param.grad` is this rank's part of the averaged gradient, in the part's
shape: any optimizer steps parts as it would step parameters. While the module computes, parameters are whole. In its
backward `param.grad` is autograd's own whole gradient; what was in it before waits in `_resting`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, Residence
from zero.sdp.bucket import GradBucket, Phase


class Stage(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    BACKWARD = "in backward"


class Unit:
    """The parameters that are gathered together for one module."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: list[FlatGroup],
        *,
        sent_as: torch.dtype | None = None,
        replicas: Comm | None = None,
    ) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.stage = Stage.IDLE
        self.depth = 0
        """Forwards of the module that are running: more than one where it calls itself."""
        self.calls = 0
        """Forwards whose backward is not yet complete."""
        self.views: list[Tensor] = []
        """What the running forwards see of their inputs: views that tell when backward leaves the unit."""
        self.kept = False
        """Whether a backward under no_sync came here since the last that was not."""
        self.buckets = [GradBucket(group, sent_as=sent_as, replicas=replicas) for group in groups]
        self.title = f"unit {name!r}" if name else "the root unit"
        self.reduce_channel = groups[0].comm.channel(f"the reduction of {self.title}") if groups else None
        self._resting: dict[nn.Parameter, Tensor] = {}
        self._unreduced: dict[nn.Parameter, Tensor] = {}

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.stage.value}, {self.groups})"

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def whole(self) -> bool:
        return all(group.residence is Residence.WHOLE for group in self.groups)

    def unshard(self) -> bool:
        """Collective. Makes the parameters whole. Returns whether that took a gather."""
        launched = [group for group in self.groups if group.residence is Residence.PART]
        for group in launched:
            group.launch_gather()
        for group in launched:
            group.finish_gather()
        return bool(launched)

    def reshard(self) -> None:
        """Leaves of the parameters this rank's part."""
        for group in self.groups:
            if group.residence is Residence.WHOLE:
                group.release()

    # ------------------------------------------------------------------------------------------- gradients

    def _trained(self) -> Iterator[tuple[GradBucket, int, nn.Parameter]]:
        for bucket in self.buckets:
            for index in bucket.trained:
                yield bucket, index, bucket.flat.params[index]

    def enter_backward(self) -> bool:
        """Collective. From here on autograd may write whole gradients. Returns whether that took a gather."""
        gathered = self.unshard()
        self.stage = Stage.BACKWARD
        for bucket in self.buckets:
            bucket.notice_trained()
        for _, _, param in self._trained():
            param.grad = self._put_by(param)
        return gathered

    def _put_by(self, param: nn.Parameter) -> Tensor | None:
        """Puts the gradient of the part by, until this backward's joins it; returns the whole one that no_sync kept.

        What zero_grad has cleared since is cleared here too.
        """
        shown, param.grad = param.grad, None
        unreduced = self._unreduced.pop(param, None)
        if shown is None:
            self._resting.pop(param, None)
        elif unreduced is None:
            self._resting[param] = shown
        return None if shown is None else unreduced

    def end_backward(self) -> None:
        """Hands the gradients to the buckets, for `launch_reduce` to send, and leaves of the parameters the parts."""
        for bucket, index, param in self._trained():
            bucket.take_from(param, index)
        self.kept = False
        self._leave_backward()

    def take_leftovers(self) -> None:
        """Hands to the buckets what backwards under no_sync kept here, after a backward that did not come here."""
        for bucket, index, param in self._trained():
            unreduced = self._put_by(param)
            if unreduced is not None:
                bucket.take(index, unreduced)
        self.kept = False

    def launch_reduce(self) -> None:
        """Collective. Sends the gradients that the buckets have to their owners."""
        for bucket in self.buckets:
            if bucket.trained:
                bucket.launch()

    def finish_reduce(self) -> None:
        """Waits for this rank's part of the gradients, and adds it to what was there before."""
        for bucket in self.buckets:
            if bucket.phase is Phase.REDUCING:
                params = bucket.flat.params

                def deliver(index: int, gradient: Tensor | None, params: list[nn.Parameter] = params) -> None:
                    resting = self._resting.pop(params[index], None)
                    if gradient is not None:
                        gradient = gradient.to(params[index].dtype)
                    if resting is not None and gradient is not None:
                        gradient = resting.add_(gradient)
                    params[index].grad = resting if gradient is None else gradient

                bucket.finish(deliver)

    def keep_gradients(self) -> None:
        """Ends a backward under no_sync: whole gradients stay here; `param.grad` shows this rank's share of them."""
        kept = {
            param: (bucket, index, param.grad) for bucket, index, param in self._trained() if param.grad is not None
        }
        for param in kept:
            param.grad = None
        self._leave_backward()
        self.kept = True
        for param, (bucket, index, gradient) in kept.items():
            flat = bucket.flat
            ordered = flat.in_memory_order(index, gradient)
            span = flat.spans.get(index)
            share = ordered[span.start : span.stop] if span else ordered[:0]
            param.grad = flat.shaped(index, share, span) if span else share.view(flat.part_views[index].shape)
            self._unreduced[param] = gradient

    def unreduced(self, param: nn.Parameter) -> bool:
        """Whether a gradient of the parameter waits here that no_sync kept from its owners."""
        return param in self._unreduced

    def _leave_backward(self) -> None:
        self.stage = Stage.IDLE
        self.calls = 0
        self.reshard()

    def abandon(self) -> None:
        """Forgets a forward or backward that an exception ended."""
        if self.stage is Stage.BACKWARD:
            for _, _, param in self._trained():
                param.grad = None
        for bucket in self.buckets:
            bucket.abandon()
        self.depth = 0
        self.views.clear()
        self.kept = False
        self._leave_backward()
        for param, resting in self._resting.items():
            param.grad = resting
        self._resting.clear()
        self._unreduced.clear()
