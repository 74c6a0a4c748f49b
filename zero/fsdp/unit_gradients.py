"""The gradients of one unit: this rank's shards of them at rest, and the full gradients that autograd writes.

at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
in backward   `param.grad` is autograd's own full gradient; the shard's earlier gradient is in `_accumulated`
no_sync       the buckets have taken the full gradients, and launch nothing; `param.grad` is this rank's slice
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero.sdp.bucket import GradBucket
from zero.shards.shard_group import ShardGroup


class UnitGradients:
    """The gradients of the parameters in these groups.

    `buckets`: one a group.
    """

    def __init__(self, groups: Sequence[ShardGroup], *, sent_as: torch.dtype | None = None) -> None:
        self.buckets = [GradBucket(group, group.params, sent_as=sent_as) for group in groups]
        self._left = False
        """Whether a backward under no_sync has gone through the unit since its gradients were last reduced."""
        self._left_frozen: dict[nn.Parameter, Tensor] = {}
        """Full gradients that it has left, of parameters that were frozen in the backward that reduced the others."""
        self._trained: list[tuple[GradBucket, int, nn.Parameter]] = []
        """The parameters that have gradients in this backward, with their places."""
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._slices: dict[nn.Parameter, Tensor] = {}
        """This rank's slices of gradients that are not reduced. Each is `param.grad`, until the user clears that, or
        the accumulated gradient of the shard stands there."""

    @property
    def reducing(self) -> bool:
        """Whether a reduction of the gradients is in flight."""
        return any(bucket.reducing for bucket in self.buckets)

    @property
    def left_unreduced(self) -> bool:
        """Whether no_sync has left gradients that a backward is to reduce."""
        return self._left or any(param.requires_grad for param in self._left_frozen)

    # ------------------------------------------------------------------------------------------- a backward

    def enter_backward(self) -> None:
        """Sets `param.grad` up for the full gradients that autograd writes from here on."""
        for param, gradient in self._begin().items():
            param.grad = gradient

    def hand_over_leftovers(self) -> None:
        """Has the buckets reduce what they took under no_sync, if a later backward has not reached the unit."""
        unreduced = self._begin()
        for bucket, index, param in self._trained:
            bucket.take(index, unreduced.get(param))

    def _begin(self) -> dict[nn.Parameter, Tensor]:
        """Sets accumulated gradients aside; no reduction is in flight. Returns the gradients that no_sync has left.

        Drops both where the user has cleared `param.grad`.
        """
        self._left = False
        left, self._left_frozen = self._left_frozen, {}
        for bucket in self.buckets:
            assert not bucket.reducing
            left.update((bucket.group.params[index], gradient) for index, gradient in bucket.give_back())
            bucket.notice_trained()
        self._trained = [
            (bucket, index, bucket.group.params[index]) for bucket in self.buckets for index in bucket.trained
        ]
        unreduced: dict[nn.Parameter, Tensor] = {}
        trained = {param for _, _, param in self._trained}
        self._left_frozen = {param: gradient for param, gradient in left.items() if param not in trained}
        for bucket, index, param in self._trained:
            grad, shown = param.grad, self._slices.pop(param, None)
            if grad is None:
                self._accumulated.pop(param, None)
                continue
            param.grad = None
            if grad is not shown:
                self._accumulated[param] = bucket.group.as_shard(index, grad)
            if shown is not None and param in left:
                unreduced[param] = left[param]
        return unreduced

    def show_unreduced(self) -> None:
        """Shows in `param.grad` this rank's slices of what the buckets have taken. The parameters are resharded."""
        self._left = True
        for bucket, index, param in self._trained:
            own = bucket.own_of_taken(index)
            if own is None:  # this backward has no gradient of it
                param.grad = self._accumulated.pop(param, None)
            else:
                param.grad = self._slices[param] = own

    def finish(self, title: str) -> None:
        """Waits for this rank's shards of the gradients, and adds them to the accumulated ones. title: the unit's."""
        for bucket, index, param in self._trained:
            if param.grad is not None:  # autograd does not refuse it if the shard has the full parameter's shape
                raise RuntimeError(
                    f"{bucket.group.names[index]} got a gradient after {title} of FSDP had sent its gradients, in the "
                    "same backward, and not through an output of the unit's forward. Compute with parameters inside "
                    "forward, and return the results."
                )
            if param in self._accumulated:
                param.grad = self._accumulated.pop(param)
        for bucket in self.buckets:
            bucket.finish()

    # ---------------------------------------------------------------------------------------------- at rest

    def unreduced(self, param: nn.Parameter) -> bool:
        """Returns whether the parameter has a gradient from no_sync that was not reduced."""
        return param in self._slices

    # -------------------------------------------------------------------------------------------- exceptions

    def drop_full(self) -> None:
        """Drops the full gradients of a backward that an exception has ended."""
        for _, _, param in self._trained:
            param.grad = None
        self._left = False

    @property
    def has_set_aside(self) -> bool:
        """Whether gradients from before a backward that an exception has ended are set aside."""
        return bool(self._accumulated.keys() - self._slices.keys())

    def restore(self) -> None:
        """Puts these gradients back into `param.grad`. Unreduced gradients remain."""
        for param in self._accumulated.keys() - self._slices.keys():
            param.grad = self._accumulated.pop(param)

    def abandon(self) -> None:
        """Waits for the reductions in flight and drops their results. Unreduced gradients remain."""
        for bucket in self.buckets:
            bucket.abandon(keeps_taken=bool(self._slices))
