"""The gradients of one unit: this rank's shards of them at rest, and the full gradients that autograd writes.

    at rest       `param.grad` is this rank's shard of the averaged gradient, in the shard's shape, for any optimizer
    in backward   `param.grad` is autograd's own full gradient; the shard's earlier gradient is in `_accumulated`
    no_sync       full gradients are in `_unreduced`; `param.grad` is this rank's shard of them, or of earlier ones

Autograd adds gradients of results computed from parameters at rest to `param.grad` at rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from zero.comm import Wire
from zero.comm.wire import PLAIN
from zero.sdp.bucket import GradBucket
from zero.shards.shard_group import ShardGroup


class UnitGradients:
    """The gradients of the parameters in these groups.

    `buckets`: one a group.
    `left_unreduced`: whether a backward under no_sync has gone through the unit since its gradients were last reduced.
    `reducing`: whether a reduction of the gradients is in flight.
    """

    def __init__(self, groups: Sequence[ShardGroup], *, wire: Wire = PLAIN) -> None:
        self.buckets = [GradBucket(group, group.params, wire=wire) for group in groups]
        self.left_unreduced = self.reducing = False
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._unreduced: dict[nn.Parameter, Tensor] = {}
        self._shows_accumulated: set[nn.Parameter] = set()
        """Parameters with an unreduced gradient whose `grad` is the accumulated gradient of the shard."""

    def _trained(self) -> Iterator[tuple[GradBucket, int, nn.Parameter]]:
        for bucket in self.buckets:
            for index in bucket.trained:
                yield bucket, index, bucket.group.params[index]

    # ------------------------------------------------------------------------------------------- a backward

    def enter_backward(self) -> None:
        """Sets `param.grad` up for the full gradients that autograd writes from here on. No reduction is in flight."""
        for bucket in self.buckets:
            assert not bucket.reducing
            bucket.notice_trained()
        for _, _, param in self._trained():
            param.grad = self._set_aside(param)

    def _set_aside(self, param: nn.Parameter) -> Tensor | None:
        """Sets the shard's gradient aside, returns no_sync's full gradient; drops both if zero_grad was called."""
        grad, param.grad = param.grad, None
        unreduced = self._unreduced.pop(param, None)
        if grad is None:
            self._accumulated.pop(param, None)
        elif unreduced is None or param in self._shows_accumulated:
            self._accumulated[param] = grad
        self._shows_accumulated.discard(param)
        return None if grad is None else unreduced

    def hand_over(self) -> None:
        """Moves the gradients of a complete backward into the buckets, to be reduced."""
        for bucket in self.buckets:
            for index in bucket.trained:
                param = bucket.group.params[index]
                gradient, param.grad = param.grad, None
                bucket.take(index, gradient)
        self.reducing, self.left_unreduced = True, False

    def hand_over_leftovers(self) -> None:
        """Moves gradients of backwards under no_sync into the buckets, if a later backward did not reach the unit."""
        for bucket, index, param in self._trained():
            bucket.take(index, self._set_aside(param))
        self.reducing, self.left_unreduced = True, False

    def finish(self, title: str) -> None:
        """Waits for this rank's shards of the gradients, and adds them to the accumulated ones. title: the unit's."""
        for bucket, index, param in self._trained():
            if param.grad is not None:  # autograd does not refuse it if the shard has the full parameter's shape
                raise RuntimeError(
                    f"{bucket.group.names[index]} got a gradient after {title} of FSDP had sent its gradients, in the "
                    "same backward, and not through an output of the unit's forward. Compute with parameters inside "
                    "forward, and return the results."
                )
            param.grad = self._accumulated.pop(param, None)
        for bucket in self.buckets:
            if bucket.reducing:
                bucket.finish()
        self.reducing = False

    # ----------------------------------------------------------------------------------------- under no_sync

    def take_full(self) -> dict[nn.Parameter, tuple[ShardGroup, int, Tensor]]:
        """Takes the full gradients of a backward under no_sync, for `keep` once the parameters are resharded."""
        full = {param: (bucket.group, i, param.grad) for bucket, i, param in self._trained() if param.grad is not None}
        for param in full:
            param.grad = None
        return full

    def keep(self, full: dict[nn.Parameter, tuple[ShardGroup, int, Tensor]]) -> None:
        """Stores full gradients until they are reduced; `param.grad` shows the elements of this rank's shard."""
        self.left_unreduced = True
        for param in self._accumulated.keys() - full.keys():  # this backward has no gradient of them
            param.grad = self._accumulated.pop(param)
        for param, (group, index, gradient) in full.items():
            ordered = group.shapes.in_memory_order(index, gradient)
            span = group.spans.get(index)
            shard = (ordered[span.start : span.stop] if span else ordered[:0]).to(group.shard)
            param.grad = group.shapes.shaped(index, shard) if span else shard.view(group.shard_views[index].shape)
            self._unreduced[param] = gradient

    def unreduced(self, param: nn.Parameter) -> bool:
        """Returns whether the parameter has a gradient from no_sync that was not reduced."""
        return param in self._unreduced

    # ---------------------------------------------------------------------------------------------- at rest

    def show_accumulated(self, param: nn.Parameter) -> None:
        """Puts the shard's accumulated gradient into `param.grad`, to which autograd is about to add another."""
        if param.grad is None:  # cleared
            self._unreduced.pop(param, None)
            self._accumulated.pop(param, None)
        elif param in self._unreduced and param not in self._shows_accumulated:
            param.grad = self._accumulated.pop(param, None)
            self._shows_accumulated.add(param)

    # -------------------------------------------------------------------------------------------- exceptions

    def drop_full(self) -> None:
        """Drops the full gradients of a backward that an exception has ended."""
        for _, _, param in self._trained():
            param.grad = None
        self.left_unreduced = False

    @property
    def has_set_aside(self) -> bool:
        """Whether gradients from before a backward that an exception has ended are set aside."""
        return bool(self._accumulated.keys() - self._unreduced.keys())

    def restore(self) -> None:
        """Puts these gradients back into `param.grad`. Unreduced gradients remain."""
        for param in self._accumulated.keys() - self._unreduced.keys():
            param.grad = self._accumulated.pop(param)

    def abandon(self) -> None:
        """Waits for the reductions in flight and drops their results."""
        self.reducing = False
        for bucket in self.buckets:
            bucket.abandon()
