"""The gradients of one shard group of a unit: this rank's shards of them at rest, and the full ones in backward.

at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
in backward   `param.grad` is autograd's own full gradient; the shard's earlier gradient is set aside
no_sync       `param.grad` stays this rank's own full gradient, as with DistributedDataParallel: what is written into it
              counts, and None drops it, with the gradient that was set aside
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from zero.shards.shard_group import ShardGroup
from zero.wrap.bucket import GradBucket


class UnitBucket(GradBucket):
    """The bucket of a shard group whose `param.grad` is a full gradient in backward, and a shard at rest."""

    def __init__(self, group: ShardGroup, *, sent_as: torch.dtype | None = None) -> None:
        super().__init__(group, sent_as=sent_as)
        # The gradients of shards from before this backward.
        self._set_aside: dict[int, Tensor] = {}
        # Whether a backward under no_sync has gone through the unit since the last one that reduces. It may have left
        # gradients on other ranks only, so all reduce then.
        self._left = False
        # Positions of the parameters whose `param.grad` no_sync has left full, unless the user has cleared it.
        self._unreduced: set[int] = set()

    @property
    def left_unreduced(self) -> bool:
        """Whether no_sync has left gradients that a backward is to reduce."""
        return self._left or any(self.group.params[index].requires_grad for index in self._unreduced)

    # ------------------------------------------------------------------------------------------- a backward

    def pre_backward(self) -> None:
        """Sets `param.grad` up for the full gradients that autograd writes from here on: adds to those that no_sync has
        left, and sets those of shards aside. No reduction is in flight.

        Raises RuntimeError for a shard's gradient in the place of a full one that no_sync has left.
        """
        assert self._handle is None, "a reduction is in flight"
        self._left = False
        for index in self.trained:
            param, full = self.group.params[index], self.group.shapes.full[index]
            grad = param.grad
            if grad is None:
                self._set_aside.pop(index, None)
            elif index not in self._unreduced:
                param.grad, self._set_aside[index] = None, self.group.as_shard(index, grad)
            elif grad.shape != full:
                raise RuntimeError(
                    f"{self.group.names[index]} has a `param.grad` of shape {list(grad.shape)} in place of the full "
                    f"gradient of shape {list(full)} that the last backward under no_sync() has left, and that no "
                    "backward has averaged yet. Write into that in place (`param.grad.mul_(0.5)`), or set it to None, "
                    "which drops it."
                )
        self._unreduced.difference_update(self.trained)

    def take_written(self) -> None:
        """Takes what autograd has written, once backward has passed the unit. Of parameters that this backward did not
        reach, that is what was accumulated under no_sync."""
        for index in self.trained:
            param = self.group.params[index]
            if index not in self.taken:
                gradient, param.grad = param.grad, None
                self.take(index, gradient)

    def keep_unreduced(self) -> None:
        """Leaves what autograd has written in `param.grad`. The parameters are resharded."""
        self._left = True
        for index in self.trained:
            param = self.group.params[index]
            if param.grad is None:  # this backward has no gradient of it
                self._set(index, self._set_aside.pop(index, None))
            else:
                self._unreduced.add(index)

    def finish(self) -> None:
        """Waits for this rank's shards of the gradients, and adds them to those that were set aside."""
        # Before super(), which adds the new gradients to what `param.grad` has.
        for index in self._set_aside.keys() & self.trained:
            self._set(index, self._set_aside.pop(index))
        super().finish()

    def _held(self, index: int) -> Tensor | None:
        return self.params[index].grad

    def _set(self, index: int, gradient: Tensor | None) -> None:
        self.group.bound.set_gradient(index, gradient)

    def decide(self, used: Mapping[int, bool]) -> None:
        """Adds what only other ranks have used. A gradient of which this rank owns nothing is an empty tensor, so that
        no rank alone finds None where there is a gradient."""
        super().decide(used)
        for index in self.reduced - self.group.shapes.spans.keys():
            param = self.group.params[index]
            if param.grad is None:
                self._set(index, torch.empty_like(self.group.shard_views[index]))

    # ---------------------------------------------------------------------------------------------- at rest

    def unreduced(self, index: int) -> bool:
        """Returns whether `param.grad` of the parameter is a gradient from no_sync that was not reduced."""
        return index in self._unreduced and self.group.params[index].grad is not None

    def name_of_unreduced(self, params: Container[nn.Parameter]) -> str | None:
        """Returns the name of one of these parameters with such a gradient, if there is one."""
        of_group = self.group.params
        found = (index for index in self._unreduced if self.unreduced(index) and of_group[index] in params)
        return next((self.group.names[index] for index in found), None)

    # -------------------------------------------------------------------------------------------- exceptions

    def drop_full(self) -> None:
        """Drops the full gradients of a backward that an exception has ended."""
        for index in self.trained:
            self.group.params[index].grad = None

    @property
    def has_set_aside(self) -> bool:
        """Whether gradients from before a backward that an exception has ended are set aside."""
        return bool(self._set_aside.keys() - self._unreduced)

    def forget_set_aside(self) -> None:
        """Drops these gradients: the user has cleared what there was."""
        self._set_aside.clear()

    def restore(self) -> None:
        """Puts these gradients back into `param.grad`. Unreduced gradients remain."""
        for index in self._set_aside.keys() - self._unreduced:
            self._set(index, self._set_aside.pop(index))
