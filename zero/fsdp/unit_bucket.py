"""The gradients of one shard group of a unit: this rank's shards of them at rest, and the full ones in backward.

at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
in backward   `param.grad` is autograd's own full gradient; the shard's earlier gradient is set aside
no_sync       the bucket has taken the full gradients, and launches nothing; `param.grad` is this rank's slice
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.sdp.bucket import GradBucket
from zero.shards.shard_group import ShardGroup


class UnitBucket(GradBucket):
    """The bucket of a shard group whose `param.grad` is a full gradient in backward, and a shard at rest."""

    def __init__(self, group: ShardGroup, *, sent_as: torch.dtype | None = None) -> None:
        super().__init__(group, group.params, sent_as=sent_as)
        self._left = False
        """Whether a backward under no_sync has gone through the unit since its gradients were last reduced."""
        self._left_frozen: dict[int, Tensor] = {}
        """Full gradients that it has left, of parameters that were frozen in the backward that reduced the others."""
        self._set_aside: dict[int, Tensor] = {}
        """The gradients of shards from before this backward."""
        self._slices: dict[int, Tensor] = {}
        """This rank's slices of gradients that are not reduced. Each is `param.grad`, until the user clears that, or
        the gradient that was set aside stands there."""

    @property
    def left_unreduced(self) -> bool:
        """Whether no_sync has left gradients that a backward is to reduce."""
        return self._left or any(self.group.params[index].requires_grad for index in self._left_frozen)

    # ------------------------------------------------------------------------------------------- a backward

    def enter_backward(self) -> None:
        """Sets `param.grad` up for the full gradients that autograd writes from here on."""
        for index, gradient in self._begin().items():
            self.group.params[index].grad = gradient

    def hand_over_leftovers(self) -> None:
        """Takes again what it took under no_sync, if a later backward has not reached the unit."""
        unreduced = self._begin()
        for index in self.trained:
            self.take(index, unreduced.get(index))

    def _begin(self) -> dict[int, Tensor]:
        """Sets gradients of shards aside; no reduction is in flight. Returns the gradients that no_sync has left.

        Drops both where the user has cleared `param.grad`.
        """
        assert self._handle is None, "a reduction is in flight"
        left = {**self._left_frozen, **(dict(self.give_back()) if self.taken else {})}
        self.notice_trained()
        self._left, self._left_frozen = False, {i: left[i] for i in left.keys() - {*self.trained}} if left else {}
        unreduced: dict[int, Tensor] = {}
        for index in self.trained:
            param, shown = self.group.params[index], self._slices.pop(index, None)
            grad = param.grad
            if grad is None:
                self._set_aside.pop(index, None)
                continue
            param.grad = None
            if grad is not shown:
                self._set_aside[index] = self.group.as_shard(index, grad)
            if shown is not None and index in left:
                unreduced[index] = left[index]
        return unreduced

    def take_written(self) -> None:
        """Takes what autograd has written, once backward has passed the unit. Of parameters that this backward did not
        reach, that is what was accumulated under no_sync."""
        for index in self.trained:
            param = self.group.params[index]
            if index not in self.taken:
                gradient, param.grad = param.grad, None
                self.take(index, gradient)

    def show_unreduced(self) -> None:
        """Shows in `param.grad` this rank's slices of what it has taken. The parameters are resharded."""
        self._left = True
        for index in self.trained:
            own = self._own_of_taken(index)
            if own is None:  # this backward has no gradient of it
                self.group.params[index].grad = self._set_aside.pop(index, None)
            else:
                self.group.params[index].grad = self._slices[index] = own

    def _own_of_taken(self, index: int) -> Tensor | None:
        """Returns this rank's slice of a gradient that was taken, in the dtype and on the device of the shard; None if
        none of this parameter was taken."""
        flat, group = self.taken.get(index), self.group
        if flat is None:
            return None
        if index not in group.spans:
            return torch.empty_like(group.shard_views[index])
        span = group.spans[index]
        return group.shapes.shaped(index, flat[span.start : span.stop].to(group.shard))

    def finish(self) -> None:
        """Waits for this rank's shards of the gradients, and adds them to those that were set aside."""
        for index in self.trained:
            param = self.group.params[index]
            if param.grad is not None:  # autograd does not refuse it if the shard has the full parameter's shape
                raise RuntimeError(
                    f"{self.group.names[index]} got a gradient after {self.group.label} of FSDP had sent its "
                    "gradients, in the same backward, and not through an output of the unit's forward. Compute with "
                    "parameters inside forward, and return the results."
                )
            if index in self._set_aside:
                param.grad = self._set_aside.pop(index)
        super().finish()

    # ---------------------------------------------------------------------------------------------- at rest

    def unreduced(self, index: int) -> bool:
        """Returns whether the parameter has a gradient from no_sync that was not reduced."""
        return index in self._slices

    # -------------------------------------------------------------------------------------------- exceptions

    def drop_full(self) -> None:
        """Drops the full gradients of a backward that an exception has ended."""
        for index in self.trained:
            self.group.params[index].grad = None
        self._left = False

    @property
    def has_set_aside(self) -> bool:
        """Whether gradients from before a backward that an exception has ended are set aside."""
        return bool(self._set_aside.keys() - self._slices.keys())

    def restore(self) -> None:
        """Puts these gradients back into `param.grad`. Unreduced gradients remain."""
        for index in self._set_aside.keys() - self._slices.keys():
            self.group.params[index].grad = self._set_aside.pop(index)

    def abandon(self) -> None:
        """Waits for the reduction in flight and drops its results. Unreduced gradients remain."""
        if self._slices:
            self.forget_sent()
        else:
            super().abandon()
